"""Compile the stub of the CUDA libraries for this interpreter's torch, and install it where torch looks for them.

readelf shows which functions, in which version, torch's libraries need of which library. The C files define those that
tests need; for each of the others a function that only returns success is generated, or of the driver one that is not
supported. One shared object is linked under
the names of all libraries, in the directory that torch's RPATH names, so no environment variable has to be set.
"""

import re
import subprocess
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
SITE = Path(sysconfig.get_path("purelib"))
TORCH_LIBRARIES = SITE / "torch" / "lib"
HEADERS = [*SITE.glob("nvidia/*/include")]
INTO = next(
    path.parent / "lib" for path in HEADERS if (path / "cuda.h").exists()
)  # torch's RPATH names it
STUB = INTO / "libcudastub.so"
FUNCTIONS = re.compile(
    r"_*cuda|cu[A-Z]|cublas|cudnn|cufft|cusparse|cusolver|curand|p?nccl|nvrtc|cupti|nvshmem|nvml"
)
LIBRARIES = re.compile(r"NEEDED.*\[(lib(?:cu|nv|nccl)[^\]]*)\]")
NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED
RETURNS_TEXT = re.compile(r"(Error|Status|Result)String$|ErrorName$")


def lines(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def wanted_by_torch():
    """Return the functions that torch needs, with their versions, and the names of the libraries."""
    functions, libraries = {}, {"libcuda.so.1", "libnvidia-ml.so.1"}
    for library in TORCH_LIBRARIES.glob("lib*.so"):
        for line in lines("readelf", "--dynamic", "--dyn-syms", "--wide", library):
            if needed := LIBRARIES.search(line):
                libraries.add(needed[1])
            field = line.split()
            if len(field) >= 8 and field[6] == "UND" and FUNCTIONS.match(field[7]):
                name, _, version = field[7].partition("@")
                functions[name] = version
    for name in re.findall(
        rb"(?<=\0)((?:nvml|cu)[A-Z]\w+)(?=\0)", (TORCH_LIBRARIES / "libc10_cuda.so").read_bytes()
    ):
        functions.setdefault(name.decode(), "")  # looked up by name at run time
    return functions, libraries


def defined_in(object_file):
    rows = (line.split() for line in lines("readelf", "--syms", "--wide", object_file))
    return {
        row[7]
        for row in rows
        if len(row) == 8 and row[3:6] == ["FUNC", "GLOBAL", "DEFAULT"] and row[6] != "UND"
    }


def generated(name):
    if RETURNS_TEXT.search(name):
        return f'const char *{name}(void) {{ return "stub"; }}\n'
    if re.match("cu[A-Z]", name):
        return f"int {name}(void) {{ return {NOT_SUPPORTED}; }}\n"
    is_cuda = int(name.startswith("cuda"))  # in a poisoned process all of these fail
    return f'int {name}(void) {{ return cudastub_missing("{name}", {is_cuda}); }}\n'


def version_script(functions, defined):
    by_version = {"CUDASTUB": sorted(defined - set(functions))}
    for name, version in sorted(functions.items()):
        by_version.setdefault(version.strip("@") or "CUDASTUB", []).append(name)
    members = {
        version: " ".join(f"{name};" for name in names) for version, names in by_version.items()
    }
    return "".join(f"{version} {{ global: {names} }};\n" for version, names in members.items())


def main():
    functions, libraries = wanted_by_torch()
    INTO.mkdir(exist_ok=True)
    objects, rest, script = INTO / "bed.o", INTO / "generated.c", INTO / "versions.map"
    compiler = [
        "gcc",
        "-O2",
        "-fPIC",
        "-fvisibility=hidden",
        "-D_GNU_SOURCE",
        "-Wall",
        "-Werror",
        *(f"-I{path}" for path in HEADERS),
    ]
    subprocess.run([*compiler, "-r", "-o", objects, *sorted(HERE.glob("*.c"))], check=True)
    defined = defined_in(objects)
    bodies = "".join(generated(name) for name in sorted(set(functions) - defined))
    rest.write_text(
        f"#pragma GCC visibility push(default)\nint cudastub_missing(const char *, int);\n{bodies}"
    )
    script.write_text(version_script(functions, defined))
    links = [
        "-Wl,--disable-new-dtags,-rpath,$ORIGIN",
        f"-Wl,-soname,libcuda.so.1,--version-script={script}",
    ]
    subprocess.run(
        [
            *compiler,
            "-fno-builtin",
            "-shared",
            "-o",
            f"{STUB}.new",
            objects,
            rest,
            *links,
            "-lpthread",
            "-ldl",
        ],
        check=True,
    )
    for name in sorted(libraries):
        (INTO / name).unlink(missing_ok=True)
        (INTO / name).symlink_to(STUB.name)
    Path(f"{STUB}.new").replace(STUB)  # atomically, when everything else is in place


if __name__ == "__main__":
    main()
