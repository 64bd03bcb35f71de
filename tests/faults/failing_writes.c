/* A disk that is full from the n-th write on, for what lies under one folder.

   cc -shared -fPIC -o failing_writes.so failing_writes.c -ldl; loaded by LD_PRELOAD, armed through ctypes. Whatever may
   need room on a disk counts as a write: making a file or folder, writing, a change of size, making it durable, a
   rename. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[4096];
static long full_from, calls;

/* Count writes under `path` and let them fail from the n-th on; 0: none fails. */
void arm(const char *path, long n) {
    snprintf(folder, sizeof folder, "%s", path);
    full_from = n;
    calls = 0;
}

long counted(void) { return calls; }

static int full(const char *path) {
    size_t length = strlen(folder);
    if (!length || strncmp(path, folder, length) != 0) return 0;
    calls++;
    if (!full_from || calls < full_from) return 0;
    errno = ENOSPC;
    return 1;
}

static int full_fd(int fd) {
    char link[64], path[4096];
    if (!folder[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return full(path);
}

#define REAL(type, name, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))

#define ON_FD(type, name, parameters, arguments, ...)                                                                  \
    type name parameters { return full_fd(fd) ? -1 : REAL(type, name, __VA_ARGS__) arguments; }

ON_FD(ssize_t, write, (int fd, const void *b, size_t n), (fd, b, n), int, const void *, size_t)
ON_FD(ssize_t, pwrite, (int fd, const void *b, size_t n, off_t o), (fd, b, n, o), int, const void *, size_t, off_t)
ON_FD(ssize_t, pwrite64, (int fd, const void *b, size_t n, off_t o), (fd, b, n, o), int, const void *, size_t, off_t)
ON_FD(ssize_t, writev, (int fd, const struct iovec *v, int n), (fd, v, n), int, const struct iovec *, int)
ON_FD(ssize_t, sendfile, (int fd, int in, off_t *o, size_t n), (fd, in, o, n), int, int, off_t *, size_t)
ON_FD(ssize_t, sendfile64, (int fd, int in, off_t *o, size_t n), (fd, in, o, n), int, int, off_t *, size_t)
ON_FD(int, ftruncate, (int fd, off_t n), (fd, n), int, off_t)
ON_FD(int, ftruncate64, (int fd, off_t n), (fd, n), int, off_t)
ON_FD(int, fsync, (int fd), (fd), int)
ON_FD(int, fdatasync, (int fd), (fd), int)

ssize_t copy_file_range(int in, off_t *io, int fd, off_t *oo, size_t n, unsigned flags) {
    return full_fd(fd) ? -1 : REAL(ssize_t, copy_file_range, int, off_t *, int, off_t *, size_t, unsigned)(in, io, fd, oo, n, flags);
}

int mkdir(const char *path, mode_t mode) { return full(path) ? -1 : REAL(int, mkdir, const char *, mode_t)(path, mode); }

int rename(const char *from, const char *to) {
    return full(to) ? -1 : REAL(int, rename, const char *, const char *)(from, to);
}

#define OPENER(name)                                                                                                   \
    int name(const char *path, int flags, ...) {                                                                       \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode_t mode = va_arg(rest, mode_t);                                                                            \
        va_end(rest);                                                                                                  \
        if ((flags & O_CREAT) && full(path)) return -1;                                                                \
        return REAL(int, name, const char *, int, mode_t)(path, flags, mode);                                          \
    }

OPENER(open)
OPENER(open64)
