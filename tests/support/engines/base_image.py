"""The Docker base image of the tests, made from this machine's own Debian packages and Python.

No container registry is asked and nothing is downloaded: the files of a few installed packages (found through
dpkg) and the Python prefix, without its site-packages, are imported as one layer in a few seconds. Python keeps
the path that it has on the host, so a virtual environment of the host runs in a container when it is mounted
at its own path.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.support.engines import paths

SYSTEM_PACKAGES = (
    "base-files",
    "base-passwd",
    "bash",
    "coreutils",
    "dash",
    "debianutils",
    "diffutils",
    "findutils",
    "grep",
    "gzip",
    "hostname",
    "libc-bin",
    "login",
    "mawk",
    "passwd",
    "procps",
    "sed",
    "tar",
    "tzdata",
    "util-linux",
    "ca-certificates",
    "curl",
    "openssl",
    "libgcc-s1",
    "libgomp1",
    "libnuma1",
    "libstdc++6",
)
DEBIAN_PYTHON = ("python3", "python3-pip", "python3-venv")
CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
SKIPPED_DOCS = ("/usr/share/doc", "/usr/share/man", "/usr/share/locale", "/usr/share/info", "/usr/share/lintian")
SKIPPED_STDLIB = shutil.ignore_patterns(
    "test", "tests", "idlelib", "turtledemo", "lib2to3", "config-*", "site-packages", "_tkinter*", "*.a"
)
# pip alone makes an interpreter that can install the rest.
KEPT_SITE_PACKAGES = (
    "pip",
    "pip-*.dist-info",
    "setuptools",
    "setuptools-*.dist-info",
    "_distutils_hack",
    "distutils-precedence.pth",
)


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def shared_libraries(files: Iterable[Path]) -> set[Path]:
    """Paths of the system libraries that the given ELF files load, as ldd tells."""
    listing = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True).stdout
    return {Path(line.split("=>")[1].split()[0]) for line in listing.splitlines() if "=> /" in line}


def installed_closure(packages: Iterable[str]) -> list[str]:
    """The packages and all that they depend on, as far as installed here."""
    no = [f"--no-{kind}" for kind in ("suggests", "recommends", "conflicts", "breaks", "replaces", "enhances")]
    listing = output("apt-cache", "depends", "--recurse", "--installed", *no, *packages)
    reached = {line.strip() for line in listing.splitlines() if line[:1] not in (" ", "<", "|")}
    # apt also lists the other ways to satisfy a dependency, which are not installed.
    return sorted(reached & set(output("dpkg-query", "-W", "-f", "${Package}\n").split()))


def package_files(packages: Iterable[str]) -> list[Path]:
    files = [Path(line) for line in output("dpkg-query", "-L", *packages).splitlines() if line.startswith("/")]
    return [f for f in files if not str(f).startswith(SKIPPED_DOCS) and (f.is_symlink() or f.is_file())]


def place(root: Path, file: Path) -> None:
    """Copy one host file to the same place under root, below the real parent (/bin is /usr/bin)."""
    target = root / str(file.parent.resolve() / file.name).lstrip("/")
    if not target.exists() and not target.is_symlink():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, target, follow_symlinks=False)


def stage_system(root: Path) -> None:
    prefix = Path(sys.base_prefix)
    own_python = prefix != Path("/usr")
    for directory in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / directory).mkdir(parents=True)
        (root / directory).symlink_to(f"usr/{directory}")
    for file in package_files(installed_closure([*SYSTEM_PACKAGES, *(() if own_python else DEBIAN_PYTHON)])):
        place(root, file)
    if own_python:
        extensions = [f for f in prefix.glob("lib/python3*/lib-dynload/*.so") if "_tkinter" not in f.name]
        for library in (f for f in shared_libraries(extensions) if not f.is_relative_to(prefix)):
            place(root, library)
            place(root, library.resolve())
    for directory in ("dev", "proc", "sys", "run", "var/tmp", "tmp", "root", "home", "usr/local/bin"):
        (root / directory).mkdir(parents=True, exist_ok=True)
    for directory in ("tmp", "var/tmp"):
        (root / directory).chmod(0o1777)
    for name in ("passwd", "group"):
        shutil.copy(f"/usr/share/base-passwd/{name}.master", root / "etc" / name)
    shutil.copytree(
        "/etc/ssl", root / "etc/ssl", symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns("private")
    )
    if Path("/usr/local/share/ca-certificates").is_dir():
        shutil.copytree("/usr/local/share/ca-certificates", root / "usr/local/share/ca-certificates")
    for marker in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        marker.unlink()
    subprocess.run(["/sbin/ldconfig", "-r", str(root)], check=True)


def stage_python(root: Path) -> None:
    """The interpreter with its standard library and pip, at the host's path; readable for every user."""
    prefix = Path(sys.base_prefix)
    if prefix == Path("/usr"):
        return
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    target = root / str(prefix).lstrip("/")
    shutil.copytree(prefix / "lib" / version, target / "lib" / version, symlinks=True, ignore=SKIPPED_STDLIB)
    for library in prefix.glob("lib/libpython3*"):
        shutil.copy2(library, target / "lib" / library.name, follow_symlinks=False)
    site = target / "lib" / version / "site-packages"
    for pattern in KEPT_SITE_PACKAGES:
        for item in (prefix / "lib" / version / "site-packages").glob(pattern):
            if item.is_dir():
                shutil.copytree(item, site / item.name, dirs_exist_ok=True)
            else:
                site.mkdir(exist_ok=True)
                shutil.copy2(item, site / item.name)
    (target / "bin").mkdir()
    shutil.copy2(prefix / "bin" / version, target / "bin" / version)
    for name in ("python3", "python"):
        (target / "bin" / name).symlink_to(version)
        (root / "usr/local/bin" / name).symlink_to(prefix / "bin" / version)
    for name in ("pip", "pip3"):
        script = root / "usr/local/bin" / name
        script.write_text(f'#!/bin/sh\nexec "{prefix}/bin/{version}" -m pip "$@"\n')
        script.chmod(0o755)
    for parent in target.relative_to(root).parents:
        (root / parent).chmod(0o755)


def image_key() -> str:
    inputs = [Path(__file__).read_bytes(), Path(CA_BUNDLE).read_bytes(), sys.version.encode(), sys.base_prefix.encode()]
    return hashlib.sha256(b"\0".join(inputs)).hexdigest()[:16]


def image_present() -> bool:
    label = ["docker", "image", "inspect", "--format", f'{{{{index .Config.Labels "{paths.LABEL}"}}}}']
    answer = subprocess.run([*label, paths.BASE_IMAGE], capture_output=True, text=True)
    return answer.returncode == 0 and answer.stdout.strip() == image_key()


def build() -> None:
    environment = {
        "PATH": f"{sys.base_prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
        # The bundle carries the host's extra certificates; pip and requests bring their own unless told.
        "SSL_CERT_FILE": CA_BUNDLE,
        "PIP_CERT": CA_BUNDLE,
        "REQUESTS_CA_BUNDLE": CA_BUNDLE,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
    }
    changes = [f"ENV {name}={value}" for name, value in environment.items()]
    changes += ['CMD ["python3"]', f"LABEL {paths.LABEL}={image_key()}"]
    paths.CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=paths.CACHE) as folder:
        root = Path(folder)
        root.chmod(0o755)
        stage_system(root)
        stage_python(root)
        tar = subprocess.Popen(["tar", "-C", folder, "--owner=0", "--group=0", "-c", "."], stdout=subprocess.PIPE)
        flags = [flag for change in changes for flag in ("--change", change)]
        subprocess.run(["docker", "import", *flags, "-", paths.BASE_IMAGE], stdin=tar.stdout, check=True)
        if tar.wait():
            raise SystemExit("tar could not pack the base image")
    # The image that this one replaced has lost its name; nothing else carries our label without a name.
    subprocess.run(["docker", "image", "prune", "--force", "--filter", f"label={paths.LABEL}"], capture_output=True)


if __name__ == "__main__":
    if not image_present():
        build()
