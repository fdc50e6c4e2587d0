"""What a trial writes goes to copies: a trial is no training, so nothing that it writes stays.

`sitecustomize` opens this at the start of each Python process of a command. The functions with
which Python changes files then change copies, and those that read see the copies. All processes of
a trial share them, because they are files:

    FOLDER/files/PATH    the copy of PATH, or what the trial made there
    FOLDER/gone/PATH     a file, if the trial removed PATH: it hides what the user has there
    FOLDER/refused       why a change was refused

Paths below `passing` are left alone, and so are devices, pipes and sockets. Other programs, and
libraries in C or Rust, are not redirected, but for the functions in `LIBRARIES`. Like
`sitecustomize`, this runs in the command's Python, which may be 3.8 or later, and imports no
oomprobe. It calls the system through `posix`, which stays as it is.
"""

import builtins
import errno
import functools
import importlib
import io
import os
import posix
import stat

LARGEST_COPY_BYTES = 2**30
MOST_LINKS = 40  # symbolic links in one path: the kernel's limit
PASSING = ("/dev", "/proc", "/sys")
TOO_LARGE = (
    "%s has %.2f GiB, and a trial changes copies of files, which have at most %.0f GiB: open it "
    "for reading (numpy.memmap with mode='r' or 'c'), or train on a smaller file while you probe"
)
FULL = "%s has no room for a copy of %s: set TMPDIR to a folder that has"
# Functions in C and Rust that open files by name: where each is, the place and the name of that
# argument, and whether it changes what is there ("+"), replaces it ("w") or reads it ("r").
LIBRARIES = {
    "importlib": (  # modules that a program has written
        ("_bootstrap_external.FileLoader.get_data", 1, "path", "r"),
        ("_bootstrap_external.SourceFileLoader.path_stats", 1, "path", "r"),
    ),
    "torch": (
        ("_C.PyTorchFileWriter", 0, "file_name", "w"),
        ("_C.PyTorchFileReader", 0, "file_name", "r"),
        ("UntypedStorage.from_file", 0, "filename", "r"),
        ("jit.RecursiveScriptModule.save", 1, "f", "w"),  # which torch.jit.save calls, too
        ("jit.load", 0, "f", "r"),
    ),
    "safetensors": (("serialize_file", 1, "filename", "w"), ("safe_open", 0, "filename", "r")),
    "sqlite3": (("connect", 0, "database", "+"), ("dbapi2.connect", 0, "database", "+")),
    "h5py": (("File.__init__", 1, "name", "mode"),),  # an argument says it
    "pyarrow": (("memory_map", 0, "path", "r"), ("OSFile", 0, "path", "mode")),
    "cv2": (("imwrite", 0, "filename", "w"),),
}
raw_open, raw_file = io.open, io.FileIO


class Overlay:
    """The user's files, with the changes of a trial above them.

    A "real" path is absolute, has no links, and is as the program sees it; its place is where it
    is read.
    """

    def __init__(self, folder, passing):
        self.folder, self.files, self.gone = folder, folder + "/files", folder + "/gone"
        self.passing = (*PASSING, folder, *filter(None, passing))

    def is_used(self):
        """Whether the trial has changed anything."""
        return exists(self.files)

    def passes(self, real):
        """Whether a path is left alone."""
        return any(is_below(real, root) for root in self.passing)

    def absolute(self, path, dir_fd=None):
        """Return a path from the root, as the program means it."""
        if isinstance(path, int):
            return self.seen(path_of(path))
        path = os.fsdecode(path)
        if not path:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if path.startswith("/"):
            return path
        base = posix.getcwd() if dir_fd is None else path_of(dir_fd)
        return self.seen(base) + "/" + path

    def resolve(self, path, dir_fd=None, follow=True):
        """Return the real path of a name or a descriptor; the last part may stay a link."""
        path = self.absolute(path, dir_fd)
        if is_plain(path) and self.place(path) == path:
            return path  # as nearly all that a data loader reads, in half the time
        ahead, real, links = path.split("/")[::-1], "", 0
        while ahead:
            part = ahead.pop()
            if part in ("", "."):
                continue
            if part == "..":
                real = real.rpartition("/")[0]
                continue
            if real + "/" + part in PASSING:  # /proc/self/fd/1 is no link to follow
                return "/".join([real, part, *ahead[::-1]])
            target = None
            if follow or any(ahead):
                target = link_of(self.place(real + "/" + part))
            if target is None:
                real += "/" + part
                continue
            links += 1
            if links > MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            if target.startswith("/"):
                real = ""
            ahead += target.split("/")[::-1]
        return real or "/"

    def seen(self, path):
        """Return a path as the program sees it: of a copy, that of the file."""
        if is_below(path, self.files):
            return path[len(self.files) :] or "/"
        return path

    def place(self, real):
        """Return where to read: the copy or the user's own; where nothing is, if it was removed."""
        copy = self.files + real
        if exists(copy) or self.is_hidden(real):
            return copy
        return real

    def place_for_new(self, real, path):
        """Return where to make something; raise what the system raises if it cannot be made."""
        if not self.passes(real):
            if exists(self.place(real)):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            self.check_permission(real)
        return self.copy(real)

    def is_hidden(self, real):
        """Whether the trial removed what the user has there, or a folder above it."""
        try:
            return stat.S_ISREG(posix.lstat(self.gone + real).st_mode)
        except NotADirectoryError:
            return True
        except OSError:
            return False

    def is_users(self, real):
        """Whether the user has something there, and the trial did not remove it."""
        return exists(real) and not self.is_hidden(real)

    def names(self, real):
        """Return the names in a folder."""
        copy, names, below = self.files + real, set(), real.rstrip("/") + "/"
        users = self.is_users(real)
        if users:
            names = {name for name in posix.listdir(real) if not self.is_hidden(below + name)}
        if exists(copy) or not users:
            names.update(posix.listdir(copy))
        return [*names]

    def make_folder(self, real):
        """Make an empty copy of a folder, if there is one: what it holds is found in the user's."""
        copy = self.files + real.rstrip("/")
        if exists(copy):
            return
        if real != "/":
            self.make_folder(os.path.dirname(real))
        if self.is_users(real) and stat.S_ISDIR(posix.stat(real).st_mode):
            try:
                posix.mkdir(copy, stat.S_IMODE(posix.stat(real).st_mode) | stat.S_IRWXU)
            except FileExistsError:  # another process was faster
                pass

    def copy(self, real, content=True):
        """Return where to change something: its copy, made with or without content."""
        if self.passes(real) or is_special(self.place(real)):
            return real
        self.make_folder(os.path.dirname(real))
        copy = self.files + real
        if exists(copy) or not self.is_users(real):
            return copy
        status = posix.lstat(real)
        if stat.S_ISDIR(status.st_mode):
            self.make_folder(real)
        elif stat.S_ISLNK(status.st_mode):
            posix.symlink(posix.readlink(real), copy)
        elif stat.S_ISREG(status.st_mode):
            self.copy_file(real, status, content)
        return copy

    def copy_file(self, real, status, content):
        copy, part = self.files + real, "%s%s.%d" % (self.files, real, posix.getpid())
        if content and status.st_size > LARGEST_COPY_BYTES:
            size_gib = status.st_size / 2**30
            self.refuse(errno.EFBIG, TOO_LARGE % (real, size_gib, LARGEST_COPY_BYTES / 2**30))
        try:
            with raw_open(part, "wb") as target:
                if content:
                    from shutil import copyfileobj

                    with raw_open(real, "rb") as source:
                        copyfileobj(source, target, 2**20)
            posix.chmod(part, stat.S_IMODE(status.st_mode))
            posix.utime(part, ns=(status.st_atime_ns, status.st_mtime_ns))
            posix.rename(part, copy)  # so that other processes see whole copies
        except OSError as error:
            if exists(part):
                posix.unlink(part)
            if error.errno == errno.ENOSPC:
                self.refuse(errno.ENOSPC, FULL % (self.folder, real))
            raise

    def copy_all(self, real):
        """Return the place of a copy of a file, or of a folder with all that is in it."""
        place = self.place(real)
        if stat.S_ISDIR(posix.lstat(place).st_mode):
            for name in self.names(real):
                self.copy_all(real + "/" + name)
        return self.copy(real)

    def refuse(self, number, sentence):
        """Raise an error, and leave the sentence for the probe: the program may catch the error."""
        with raw_open(self.folder + "/refused", "a") as file:
            file.write(sentence + "\n")
        raise OSError(number, sentence)

    def remove(self, real):
        """Remove a file or an empty folder."""
        if exists(self.files + real):
            remove_all(self.files + real)
        self.hide(real)

    def hide(self, real):
        """Hide what the user has there."""
        marker = self.gone + real
        if not self.is_users(real):
            return
        self.make_folder("/")  # from now on it is used
        os.makedirs(os.path.dirname(marker), exist_ok=True)
        if exists(marker):
            remove_all(marker)
        posix.close(posix.open(marker, os.O_WRONLY | os.O_CREAT))

    def check_permission(self, real):
        """Raise what the system raises if the user may not change this, as training would fail."""
        while not self.passes(real) and not exists(self.files + real):
            if self.is_users(real):
                if not posix.access(real, os.W_OK, follow_symlinks=False):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), real)
                return
            real = os.path.dirname(real)

    def for_library(self, path, mode):
        """Return where a library finds, or may change, what the program names."""
        if not isinstance(path, (str, bytes, os.PathLike)) or (mode == "r" and not self.is_used()):
            return path
        text = os.fsdecode(path)
        if not text or text.startswith((":", "file:")):  # SQLite's: in memory, an address
            return path
        real = self.resolve(text)
        if mode == "r":
            return self.place(real)
        self.check_permission(real)
        return self.copy(real, content=mode == "+")

    def redirect(self, module):
        """Redirect the functions of a library, once it is imported."""
        for where, index, keyword, mode in LIBRARIES[module.__name__]:
            *owners, name = where.split(".")
            owner = functools.reduce(getattr, owners, module)
            setattr(owner, name, self.redirected(getattr(owner, name), index, keyword, mode))

    def redirected(self, function, index, keyword, mode):
        @functools.wraps(function)
        def call(*args, **kwargs):
            args, how = list(args), mode
            if mode == "mode":
                given = args[index + 1] if len(args) > index + 1 else kwargs.get("mode", "r")
                how = {"r": "r", "a": "+", "r+": "+"}.get(given.replace("b", ""), "w")
            if len(args) > index:
                args[index] = self.for_library(args[index], how)
            elif keyword in kwargs:
                kwargs[keyword] = self.for_library(kwargs[keyword], how)
            return function(*args, **kwargs)

        return call


# --- the system's functions, as the program calls them ---


class Door:
    """Takes the place of a built-in function, and like one is no method as a class's attribute."""

    def __init__(self, function, original, module):
        functools.update_wrapper(self, original)
        self.function, self.__module__ = function, module.__name__

    def __reduce__(self):
        return self.__name__  # pickled by its name, as for a pool of processes

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)


class LikeFileIO(type):
    """Lets what `open` returns be of the class that takes the place of `io.FileIO`."""

    def __instancecheck__(cls, instance):
        return isinstance(instance, raw_file)


class Entry:
    """An entry of a folder that has changed; see `os.DirEntry`."""

    def __init__(self, folder, name, path):
        self.name, self.path, self.real = name, path, os.path.join(folder, name)

    def __fspath__(self):
        return self.path

    def __repr__(self):
        return "<DirEntry %r>" % self.name

    def stat(self, *, follow_symlinks=True):
        return os.stat(self.real, follow_symlinks=follow_symlinks)

    def inode(self):
        return os.lstat(self.real).st_ino

    def is_symlink(self):
        return os.path.islink(self.real)

    def is_junction(self):
        return False

    def is_dir(self, *, follow_symlinks=True):
        return os.path.isdir(self.real) and (follow_symlinks or not self.is_symlink())

    def is_file(self, *, follow_symlinks=True):
        return os.path.isfile(self.real) and (follow_symlinks or not self.is_symlink())


class Entries:
    """The entries of a folder that has changed; see `os.scandir`."""

    def __init__(self, entries):
        self.entries = iter(entries)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.entries)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.entries = iter(())


def redirect_process(folder, passing):
    """Redirect this process and those that it forks; return the overlay."""
    overlay = Overlay(folder, passing)
    supports = (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks)
    for name, function in Doors(overlay).table():
        original = getattr(os, name)
        door = Door(function, original, os)
        setattr(os, name, door)
        for functions in supports:
            if original in functions:
                functions.add(door)
    descriptor = os.open

    def open_file(file, mode="r", *args, **kwargs):
        names = isinstance(file, (str, bytes, os.PathLike)) and kwargs.get("opener") is None
        if names and len(args) < 6 and (set("wax+") & set(mode) or overlay.is_used()):
            kwargs["opener"] = lambda path, flags: descriptor(path, flags, 0o666)
        return raw_open(file, mode, *args, **kwargs)

    class FileIO(io.FileIO, metaclass=LikeFileIO):  # by which torch.save writes names beyond ASCII
        def __init__(self, file, mode="r", closefd=True, opener=None):
            if opener is None:
                opener = lambda path, flags: descriptor(path, flags, 0o666)  # noqa: E731
            super().__init__(file, mode, closefd, opener)

    builtins.open = io.open = Door(open_file, raw_open, io)
    io.FileIO = FileIO
    overlay.redirect(importlib)
    return overlay


class Doors:
    """What takes the places of functions in `os`."""

    def __init__(self, overlay):
        self.overlay = overlay

    def look(self, name, follow=True):
        original = getattr(posix, name)

        def call(path, *args, **kwargs):
            if isinstance(path, int) or not self.overlay.is_used():
                return original(path, *args, **kwargs)
            follows = kwargs.get("follow_symlinks", follow)
            real = self.overlay.resolve(path, kwargs.pop("dir_fd", None), follows)
            return naming(path, original, self.overlay.place(real), *args, **kwargs)

        return name, call

    def change(self, name, follow=True):
        """Of what is there: its mode, owner, times, length."""
        original, of_path = getattr(posix, name), getattr(posix, name.replace("fch", "ch"))

        def call(path, *args, **kwargs):
            follows = kwargs.get("follow_symlinks", follow)
            real = self.overlay.resolve(path, kwargs.pop("dir_fd", None), follows)
            if isinstance(path, int) and not exists(self.overlay.place(real)):
                return original(path, *args, **kwargs)  # a pipe, a socket, a file without a name
            return naming(path, of_path, self.overlay.copy(real), *args, **kwargs)

        return name, call

    def make(self, name):
        original = getattr(posix, name)

        def call(path, *args, dir_fd=None, **kwargs):
            place = self.overlay.place_for_new(self.overlay.resolve(path, dir_fd, False), path)
            return naming(path, original, place, *args, **kwargs)

        return name, call

    def open_descriptor(self, path, flags, mode=0o777, *, dir_fd=None):
        writes = flags & os.O_ACCMODE != os.O_RDONLY or flags & (os.O_CREAT | os.O_TRUNC)
        if not writes and not self.overlay.is_used():
            return posix.open(path, flags, mode, dir_fd=dir_fd)
        is_new = flags & os.O_CREAT and flags & os.O_EXCL
        real = self.overlay.resolve(path, dir_fd, not (is_new or flags & os.O_NOFOLLOW))
        if is_new:
            place = self.overlay.place_for_new(real, path)
        elif writes:
            self.overlay.check_permission(real)
            place = self.overlay.copy(real, content=not flags & os.O_TRUNC)
        else:
            place = self.overlay.place(real)
        return naming(path, posix.open, place, flags, mode)

    def remove(self, name):
        original, is_of_folders = getattr(posix, name), name == "rmdir"

        def call(path, *, dir_fd=None):
            real = self.overlay.resolve(path, dir_fd, follow=False)
            if self.overlay.passes(real):
                return naming(path, original, real)
            naming(path, posix.lstat, self.overlay.place(real))
            self.check_replaceable(real, path, by_folder=is_of_folders)
            self.overlay.check_permission(os.path.dirname(real))
            return self.overlay.remove(real)

        return name, call

    def rename(self, src, dst, *, src_dir_fd=None, dst_dir_fd=None):
        old = self.overlay.resolve(src, src_dir_fd, follow=False)
        new = self.overlay.resolve(dst, dst_dir_fd, follow=False)
        place, target = self.overlay.place(old), new
        status = naming(src, posix.lstat, place, second=dst)
        if old == new:
            return
        if not self.overlay.passes(old):
            self.overlay.check_permission(os.path.dirname(old))
            if is_special(place):
                raise OSError(errno.EPERM, os.strerror(errno.EPERM), src, None, dst)
            place = self.overlay.copy_all(old)
        if not self.overlay.passes(new):
            self.check_replaceable(new, dst, by_folder=is_folder(status))
            self.overlay.check_permission(os.path.dirname(new))
            self.overlay.make_folder(os.path.dirname(new))
            target = self.overlay.files + new
        naming(src, posix.rename, place, target, second=dst)
        if not self.overlay.passes(old):
            self.overlay.hide(old)

    def check_replaceable(self, real, path, by_folder):
        """Raise what the system raises unless a file, or an empty folder, is there to replace."""
        place = self.overlay.place(real)
        if not exists(place):
            return
        if is_folder(posix.lstat(place)) != by_folder:
            number = errno.ENOTDIR if by_folder else errno.EISDIR
            raise OSError(number, os.strerror(number), path)
        if by_folder and self.overlay.names(real):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)

    def link(self, src, dst, *, src_dir_fd=None, dst_dir_fd=None, follow_symlinks=True):
        old = self.overlay.resolve(src, src_dir_fd, follow=False)  # as link(2) does
        new = self.overlay.resolve(dst, dst_dir_fd, follow=False)
        naming(src, posix.lstat, self.overlay.place(old), second=dst)
        place = self.overlay.place_for_new(new, dst)
        naming(src, posix.link, self.overlay.copy(old), place, second=dst)

    def symlink(self, src, dst, target_is_directory=False, *, dir_fd=None):
        place = self.overlay.place_for_new(self.overlay.resolve(dst, dir_fd, False), dst)
        naming(dst, posix.symlink, src, place)

    def changed_folder(self, path):
        """Return the real path of a folder that has changed; None if the system may list it."""
        if not self.overlay.is_used():
            return None
        real, files = self.overlay.resolve(path), self.overlay.files
        if self.overlay.place(real) == real and not exists(self.overlay.gone + real):
            # Relative names would be those of a copy.
            return real if exists(files + posix.getcwd()) else None
        return real

    def listdir(self, path="."):
        return [entry.name for entry in self.scandir(path)]

    def scandir(self, path="."):
        folder = self.changed_folder(path or ".")
        if folder is None:
            return posix.scandir(path)
        entries = []
        for name in naming(path, self.overlay.names, folder):
            if isinstance(path, bytes):
                folder, name = os.fsencode(folder), os.fsencode(name)
            shown = name if isinstance(path, int) else os.path.join(path or ".", name)
            entries.append(Entry(folder, name, shown))
        return Entries(entries)

    def chdir(self, path):
        if isinstance(path, int) or not self.overlay.is_used():
            return posix.chdir(path)
        real = self.overlay.resolve(path)
        if self.overlay.is_users(real):  # other programs find the user's files there
            return naming(path, posix.chdir, real)
        return naming(path, posix.chdir, self.overlay.place(real))

    def getcwd(self):
        return self.overlay.seen(posix.getcwd())

    def table(self):
        """Yield the name of each function, with what takes its place."""
        yield "open", self.open_descriptor
        yield from map(self.remove, ("unlink", "remove", "rmdir"))
        yield from (("rename", self.rename), ("replace", self.rename))
        yield from (("link", self.link), ("symlink", self.symlink))
        yield from (("listdir", self.listdir), ("scandir", self.scandir))
        yield from (("chdir", self.chdir), ("getcwd", self.getcwd))
        yield "getcwdb", lambda: os.fsencode(self.getcwd())
        yield from map(self.look, ("stat", "access", "statvfs", "getxattr", "listxattr"))
        yield from (self.look(name, follow=False) for name in ("lstat", "readlink"))
        yield from map(self.make, ("mkdir", "mkfifo", "mknod"))
        for name in ("chmod", "chown", "utime", "truncate", "setxattr", "removexattr"):
            yield self.change(name)
        for name in ("lchown", "fchmod", "fchown"):
            yield self.change(name, follow=False)


def naming(path, function, *args, second=None, **kwargs):
    """Call a function; an error that it raises names the paths that the program gave."""
    try:
        return function(*args, **kwargs)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path, None, second) from None


def path_of(descriptor):
    return posix.readlink("/proc/self/fd/%d" % descriptor)


def is_plain(path):
    """Whether the user has something at a path that has no links, for the system."""
    try:
        descriptor = posix.open(path, os.O_PATH)
    except OSError:
        return False
    try:
        return path_of(descriptor) == path
    finally:
        posix.close(descriptor)


def link_of(place):
    """Return where a link points; None if it is none."""
    try:
        return posix.readlink(place)
    except OSError:
        return None


def exists(place):
    try:
        posix.lstat(place)
    except OSError:
        return False
    return True


def is_below(path, folder):
    return path == folder or path.startswith(folder + "/")


def is_folder(status):
    return stat.S_ISDIR(status.st_mode)


def is_special(place):
    """Whether it is a device, a pipe or a socket."""
    try:
        mode = posix.stat(place).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def remove_all(place):
    """Remove a file, or a folder with all that is in it."""
    if is_folder(posix.lstat(place)):
        for name in posix.listdir(place):
            remove_all(place + "/" + name)
        posix.rmdir(place)
    else:
        posix.unlink(place)
