/* A disk that hangs, for one program and its children. The calls return no error; they do not return at all.

   cc -shared -fPIC -o hanging_disk.so hanging_disk.c -ldl
   LD_PRELOAD=./hanging_disk.so HANGING_DISK=directory HANGING_DISK_SWITCH=file program

   The file holds one byte, which this library maps. 0: the disk works. 1: calls that write below the directory wait.
   2: calls that read there wait too. When the byte returns to a lower value, the waiting calls are carried out. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static volatile char *hangs;
static const char *disk;

__attribute__((constructor)) static void begin(void) {
  int (*real_open)(const char *, int, ...) = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open");
  const char *path = getenv("HANGING_DISK_SWITCH");
  int file = path ? real_open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file >= 0) {
    void *mapped = mmap(NULL, 1, PROT_READ, MAP_SHARED, file, 0);
    disk = getenv("HANGING_DISK");
    hangs = mapped == MAP_FAILED || !disk ? NULL : mapped;
    close(file);
  }
}

static void path_wait(const char *path, char from) {
  if (hangs && *hangs >= from && path && strncmp(path, disk, strlen(disk)) == 0)
    while (*hangs >= from) usleep(20000);
}

static void file_wait(int file, char from) {
  if (!hangs || *hangs < from) return;
  char link[64], path[PATH_MAX + 1];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t length = readlink(link, path, PATH_MAX);
  if (length <= 0) return;
  path[length] = 0;
  path_wait(path, from);
}

#define REAL(result, name, ...) ((result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name))
#define OPEN(name)                                                  \
  int name(const char *path, int flags, ...) {                      \
    va_list rest;                                                   \
    va_start(rest, flags);                                          \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
    va_end(rest);                                                   \
    path_wait(path, 2);                                             \
    return REAL(int, #name, const char *, int, ...)(path, flags, mode); \
  }
#define ON_FILE(result, name, from, parameters, arguments, ...) \
  result name parameters {                                      \
    file_wait(file, from);                                      \
    return REAL(result, #name, __VA_ARGS__) arguments;          \
  }
#define ON_PATH(name, from, parameters, arguments, ...) \
  int name parameters {                                 \
    path_wait(path, from);                              \
    return REAL(int, #name, __VA_ARGS__) arguments;     \
  }

OPEN(open)
OPEN(open64)
ON_FILE(int, fsync, 1, (int file), (file), int)
ON_FILE(int, fdatasync, 1, (int file), (file), int)
ON_FILE(int, ftruncate, 1, (int file, off_t size), (file, size), int, off_t)
ON_FILE(int, ftruncate64, 1, (int file, off64_t size), (file, size), int, off64_t)
ON_FILE(int, fchmod, 1, (int file, mode_t mode), (file, mode), int, mode_t)
ON_FILE(ssize_t, write, 1, (int file, const void *from, size_t size), (file, from, size), int, const void *, size_t)
ON_FILE(ssize_t, pwrite, 1, (int file, const void *from, size_t size, off_t at), (file, from, size, at), int, const void *, size_t, off_t)
ON_FILE(ssize_t, pwrite64, 1, (int file, const void *from, size_t size, off64_t at), (file, from, size, at), int, const void *, size_t, off64_t)
ON_FILE(ssize_t, read, 2, (int file, void *to, size_t size), (file, to, size), int, void *, size_t)
ON_FILE(ssize_t, pread, 2, (int file, void *to, size_t size, off_t at), (file, to, size, at), int, void *, size_t, off_t)
ON_FILE(ssize_t, pread64, 2, (int file, void *to, size_t size, off64_t at), (file, to, size, at), int, void *, size_t, off64_t)
ON_PATH(unlink, 1, (const char *path), (path), const char *)
ON_PATH(rename, 1, (const char *path, const char *to), (path, to), const char *, const char *)
ON_PATH(mkdir, 1, (const char *path, mode_t mode), (path, mode), const char *, mode_t)
ON_PATH(access, 2, (const char *path, int mode), (path, mode), const char *, int)
ON_PATH(stat, 2, (const char *path, struct stat *result), (path, result), const char *, struct stat *)
ON_PATH(stat64, 2, (const char *path, struct stat64 *result), (path, result), const char *, struct stat64 *)
ON_PATH(lstat, 2, (const char *path, struct stat *result), (path, result), const char *, struct stat *)
ON_PATH(lstat64, 2, (const char *path, struct stat64 *result), (path, result), const char *, struct stat64 *)
