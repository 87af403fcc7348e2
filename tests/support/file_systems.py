"""File systems that lack something, by a library that is loaded before libc."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
/* Returns the error that LACK_NAME names if a path is below LACK_FOLDER, else 0. */
static int lacks(const char *name, const char *path) {
    const char *folder = getenv("LACK_FOLDER"), *number = getenv(name);
    return folder && number && !strncmp(path, folder, strlen(folder)) ? atoi(number) : 0;
}
static int fails(int error) { errno = error; return -1; }
static const char *path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, 4095);
    path[size > 0 ? size : 0] = 0;
    return path;
}
#define REAL(name) ((int (*)())dlsym(RTLD_NEXT, #name))
int flock(int fd, int operation) {
    char path[4096];
    int error = lacks("LACK_FLOCK", path_of(fd, path));
    return error ? fails(error) : REAL(flock)(fd, operation);
}
int fsync(int fd) {
    char path[4096];
    struct stat is;
    const char *name = !fstat(fd, &is) && S_ISDIR(is.st_mode) ? "LACK_FSYNC_FOLDER" : "LACK_FSYNC";
    int error = lacks(name, path_of(fd, path));
    return error ? fails(error) : REAL(fsync)(fd);
}
int link(const char *from, const char *to) {
    int error = lacks("LACK_LINK", to);
    return error ? fails(error) : REAL(link)(from, to);
}
int symlink(const char *from, const char *to) {
    int error = lacks("LACK_SYMLINK", to);
    return error ? fails(error) : REAL(symlink)(from, to);
}
int rename(const char *from, const char *to) {
    int error = access(to, F_OK) ? 0 : lacks("LACK_RENAME_OVER", to);
    return error ? fails(error) : REAL(rename)(from, to);
}
"""


def lacking(folder: Path, **errors: int) -> dict[str, str]:
    """Variables with which a process gets these errors (numbers) of calls below a folder: `flock`,
    `fsync`, `fsync_folder`, `link`, `symlink`, `rename_over` an existing file."""
    source, library = folder.parent / "shim.c", folder.parent / "shim.so"
    if not library.exists():
        source.write_text(_SHIM)
        subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, source], check=True)
    names = {f"LACK_{name.upper()}": str(error) for name, error in errors.items()}
    return {"LD_PRELOAD": str(library), "LACK_FOLDER": os.path.realpath(folder), **names}
