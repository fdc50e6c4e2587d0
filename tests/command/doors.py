"""Ways in which programs write, read back and remove files: run by `test_overlay.py` with and without the overlay of a trial.

``python doors.py FOLDER NAME ...`` runs each named way in FOLDER/NAME, which `make_home` has filled, and prints what each has seen.
"""

import json
import os
import sys
import textwrap
import warnings
from pathlib import Path


def make_home(home):
    """Make a folder of the user's, with files of all kinds and old times."""
    for name in ("out/keep", "clean/a", "tree/s", "dcp"):
        (home / name).mkdir(parents=True)
    texts = {
        "out/log.txt": "old\n", "out/last.pt": "last", "out/keep/target": "t", "clean/a/b": "b", "data": "data", "tree/s/one": "1",
        "db.sqlite": "", "dcp/.metadata": "m", "array.npy": "a", "model.safetensors": "s", "h5": "h",
    }  # fmt: skip
    for name, text in texts.items():
        (home / name).write_text(text)
    (home / "link").symlink_to("out/keep/target")
    (home / "data").chmod(0o640)
    for path in [*home.rglob("*"), home]:
        os.utime(path, (10**9, 10**9), follow_symlinks=False)


PLAIN = {
    "append": 'open("out/log.txt", "a").write("more"); seen = open("out/log.txt").read()',
    "a path": 'Path("out/last.pt").write_text("new"); seen = Path("out/last.pt").read_text(), os.path.getsize("out/last.pt")',
    "update": """
        with open("data", "r+") as file:
            file.write("D"); file.truncate(2)
        seen = open("data").read(), file.name, oct(os.stat("data").st_mode)
    """,
    "atomic": """
        open("out/last.tmp", "w").write("whole"); os.replace("out/last.tmp", "out/last.pt")
        seen = open("out/last.pt").read(), sorted(os.listdir("out"))
    """,
    "a temporary file beside": """
        with tempfile.NamedTemporaryFile("w", dir="out", delete=False) as file:
            file.write("new")
        os.replace(file.name, "out/last.pt"); seen = open("out/last.pt").read()
    """,
    "a raw file": """
        with io.FileIO("data", "w") as file:
            file.write(b"raw")
        with open("out/log.txt", "rb", buffering=0) as file:
            seen = isinstance(file, io.FileIO), open("data").read()
    """,
    "through a link": 'open("link", "w").write("new"); seen = open("out/keep/target").read(), os.path.islink("link")',
    "descriptors": """
        folder = os.open("out", os.O_RDONLY)
        file = os.open("new", os.O_WRONLY | os.O_CREAT, dir_fd=folder); os.write(file, b"x"); os.fchmod(file, 0o600); os.close(file)
        os.unlink("last.pt", dir_fd=folder)
        with open("data") as file:
            os.fchmod(file.fileno(), 0o600)
        seen = sorted(os.listdir(folder)), oct(os.stat("out/new").st_mode), oct(os.stat("data").st_mode)
    """,
    "clean a folder": """
        shutil.rmtree("clean"); gone = os.path.exists("clean/a"), sorted(os.listdir("."))
        os.makedirs("clean/new"); Path("clean/new/x").touch()
        seen = gone, os.listdir("clean"), [str(path) for path in Path("clean").rglob("*")], [*os.walk("clean")]
    """,
    "move": """
        shutil.move("out", "kept"); os.rename("tree", "out"); shutil.copy("data", "copied")
        seen = sorted(map(str, Path(".").rglob("*"))), Path("out/s/one").read_text()
    """,
    "copy a tree": 'shutil.copytree("out", "tree", dirs_exist_ok=True); seen = sorted(map(str, Path("tree").rglob("*")))',
    "links": """
        os.symlink("out/log.txt", "latest"); os.link("data", "hard"); open("latest", "a").write("x"); open("hard", "a").write("x")
        seen = open("out/log.txt").read(), open("data").read(), os.readlink("latest"), os.stat("data").st_nlink
    """,
    "mode, times and length": """
        os.chmod("data", 0o600); os.utime("tree/s/one", (1, 1)); os.truncate("out/log.txt", 1)
        with open("out/last.pt") as file:
            os.utime(file.fileno(), (5, 5))
        seen = oct(os.stat("data").st_mode), os.stat("tree/s/one").st_mtime, os.path.getsize("out/log.txt"), os.stat("out/last.pt").st_mtime
    """,
    "a folder of its own": """
        os.makedirs("runs/1"); os.chdir("runs/1"); open("x", "w").write("x")
        seen = os.path.relpath(os.getcwd(), HOME), open("../../data").read(), sorted(entry.path for entry in os.scandir("..")), os.listdir()
        os.chdir(HOME); os.rmdir("dcp") if not os.listdir("dcp") else None
    """,
    "errors": """
        seen = []
        for call in (lambda: open("none/x", "w"), lambda: open("data", "x"), lambda: os.rmdir("out"), lambda: os.mkdir("out"),
                     lambda: os.unlink("none"), lambda: os.rename("none", "x"), lambda: os.listdir("none"), lambda: open("out", "w")):
            try:
                call()
            except OSError as error:
                seen.append((type(error).__name__, error.errno, error.filename, error.filename2))
        open("new", "w")
    """,
    "archives": """
        for module in (gzip, bz2, lzma):
            with module.open("data", "wt") as file:
                file.write("z")
        with zipfile.ZipFile("z.zip", "w") as file:
            file.write("data")
        with tarfile.open("z.tar", "w") as file:
            file.add("out")
        seen = lzma.open("data", "rt").read(), zipfile.ZipFile("z.zip").namelist(), sorted(tarfile.open("z.tar").getnames())
    """,
    "a log": """
        handler = logging.FileHandler("out/log.txt"); handler.emit(logging.makeLogRecord({"msg": "said"})); handler.close()
        with open("out/scalars.csv", "a", newline="") as file:
            csv.writer(file).writerow([1, 2])
        seen = open("out/log.txt").read(), open("out/scalars.csv").read()
    """,
    "a shelf": """
        with shelve.open("shelf", flag="n") as shelf:
            shelf["a"] = 1
        seen = shelve.open("shelf", flag="r")["a"]
    """,
    "SQLite": """
        database = sqlite3.connect("db.sqlite"); database.execute("create table t (a)"); database.commit(); database.close()
        seen = sqlite3.connect("db.sqlite").execute("select name from sqlite_master").fetchall(), sqlite3.connect(":memory:") is not None
    """,
    "a forked child": """
        if not os.fork():
            open("data", "w").write("child"); os._exit(0)
        os.wait(); seen = open("data").read()
    """,
    "another Python": """
        os.unlink("out/last.pt")
        code = "import os; open('data', 'w').write(str(os.path.exists('out/last.pt')))"
        subprocess.run([sys.executable, "-c", code], check=True); seen = open("data").read()
    """,
    "a module": """
        Path("made.py").write_text("value = 7")
        spec = importlib.util.spec_from_file_location("made", os.path.join(HOME, "made.py"))
        module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module); seen = module.value
    """,
    "a pool of processes": """
        open("new", "w").write("x")
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            seen = pool.map(os.path.getsize, ["new"]), pool.apply(os.remove, ["new"]), os.path.exists("new")
        os.remove("data")
    """,
    "threads": """
        threads = [threading.Thread(target=lambda n=n: open(f"out/{n}", "w").write("x")) for n in range(8)]
        [thread.start() for thread in threads]; [thread.join() for thread in threads]; seen = sorted(os.listdir("out"))
    """,
    "nothing": 'open(os.devnull, "w").write("x"); open("data", "r").read(); open("/dev/stderr", "a").close(); open("new", "w")',
}  # fmt: skip
NUMPY_AND_TORCH = {
    "NumPy": """
        np.save("array.npy", np.ones(3)); np.arange(4.0).tofile("data")
        seen = np.load("array.npy").sum(), np.fromfile("data").sum()
    """,
    "a memory map": """
        array = np.memmap("data", dtype="u1"); array[:] = 65; array.flush(); seen = open("data").read()
    """,
    "torch.save": """
        torch.save([1], Path("out/last.pt")); first = torch.load("out/last.pt")
        with open("out/last.pt", "wb") as file:
            torch.save({"x": torch.ones(2)}, file)
        seen = first, torch.load("out/last.pt")["x"].tolist(), torch.load("out/last.pt", mmap=True)["x"].tolist()
    """,
    "a name beyond ASCII": """
        torch.save([3], "gr\u00f6\u00dfe.pt"); seen = torch.load("gr\u00f6\u00dfe.pt"), os.path.exists("gr\u00f6\u00dfe.pt")
    """,
    "torch.jit": """
        module = torch.jit.script(nn.Linear(2, 2)); torch.jit.save(module, "data"); module.save("out/last.pt")
        seen = type(torch.jit.load("data")).__name__, type(torch.jit.load("out/last.pt")).__name__
    """,
    "torch.distributed.checkpoint": """
        checkpoint.save({"x": torch.ones(3)}, checkpoint_id="dcp", no_dist=True)
        loaded = {"x": torch.zeros(3)}; checkpoint.load(loaded, checkpoint_id="dcp", no_dist=True); seen = loaded["x"].tolist()
    """,
    "safetensors": """
        from safetensors.torch import load_file, safe_open, save_file
        save_file({"x": torch.ones(3)}, "model.safetensors")
        with safe_open("model.safetensors", "pt") as file:
            seen = load_file("model.safetensors")["x"].tolist(), file.get_tensor("x").tolist()
    """,
    "fsspec": """
        import fsspec
        with fsspec.open("out/last.pt", "wb") as file:
            torch.save([2], file)
        seen = torch.load("out/last.pt"), fsspec.filesystem("file").exists("out/last.pt")
    """,
    "workers of a loader": """
        class Rows(torch.utils.data.Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, index):
                open(f"out/{index}", "w").write("x")
                return index

        list(torch.utils.data.DataLoader(Rows(), num_workers=2)); seen = sorted(os.listdir("out"))
    """,
}  # fmt: skip
WAYS = {**PLAIN, **NUMPY_AND_TORCH}
IMPORTS = """
import bz2, csv, gzip, importlib.util, io, logging, multiprocessing, lzma, os, shelve, shutil, sqlite3, subprocess, sys, tarfile, tempfile, threading, zipfile
from pathlib import Path
"""
IMPORTS_OF_TORCH = (
    "import numpy as np, torch; from torch import nn; from torch.distributed import checkpoint\n"
)


def main(folder, names):
    known = {}
    exec(IMPORTS, known)
    if not {*names} <= {*PLAIN}:
        exec(IMPORTS_OF_TORCH, known)
    for name in names:
        home = os.path.join(folder, name)
        os.chdir(home)
        local = {**known, "HOME": home}
        try:
            exec(textwrap.dedent(WAYS[name]), local)
        except Exception as error:
            local["seen"] = repr(error)
        sys.stdout.write(json.dumps([name, repr(local.get("seen"))]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(str(Path(sys.argv[1]).resolve()), sys.argv[2:])
