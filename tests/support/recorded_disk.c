/* Records the writes and syncs of a program and its children below a directory.

   cc -shared -fPIC -o recorded_disk.so recorded_disk.c -ldl
   LD_PRELOAD=./recorded_disk.so RECORDED_DISK=directory RECORDED_DISK_LOG=file program

   The log is a sequence of records. The fields of a record: the call (w write, t truncate, s sync, u unlink, r rename),
   CLOCK_MONOTONIC in seconds, the offset or the size, the lengths of the path and of the data, the path, and the data or
   the new path. A record is written after its call has returned. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static int record = -1;
static const char *disk;

#define REAL(result, name, ...) ((result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name))

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("RECORDED_DISK_LOG");
  disk = getenv("RECORDED_DISK");
  if (path && disk) record = REAL(int, "open", const char *, int, ...)(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
}

static void note(char call, const char *path, int64_t at, const void *data, size_t size) {
  struct __attribute__((packed)) { char call; double time; int64_t at; uint32_t path, data; } head;
  struct timespec now;
  if (record < 0 || !path || strncmp(path, disk, strlen(disk)) != 0) return;
  clock_gettime(CLOCK_MONOTONIC, &now);
  head.call = call;
  head.time = now.tv_sec + now.tv_nsec / 1e9;
  head.at = at;
  head.path = strlen(path);
  head.data = size;
  struct iovec parts[] = {{&head, sizeof head}, {(void *)path, head.path}, {(void *)data, size}};
  if (writev(record, parts, 3) < 0) abort();
}

static void note_file(char call, int file, int64_t at, const void *data, size_t size) {
  char link[64], path[PATH_MAX + 1];
  if (record < 0) return;
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t length = readlink(link, path, PATH_MAX);
  if (length <= 0) return;
  path[length] = 0;
  note(call, path, at, data, size);
}

#define OPEN(name)                                                          \
  int name(const char *path, int flags, ...) {                              \
    va_list rest;                                                           \
    va_start(rest, flags);                                                  \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
    va_end(rest);                                                           \
    int file = REAL(int, #name, const char *, int, ...)(path, flags, mode); \
    if (file >= 0 && flags & O_CREAT) note_file('w', file, 0, "", 0);       \
    if (file >= 0 && flags & O_TRUNC) note_file('t', file, 0, "", 0);       \
    return file;                                                            \
  }
#define WRITE(name, offset)                                                           \
  ssize_t name(int file, const void *from, size_t size, offset at) {                  \
    ssize_t done = REAL(ssize_t, #name, int, const void *, size_t, offset)(file, from, size, at); \
    if (done > 0) note_file('w', file, at, from, done);                               \
    return done;                                                                      \
  }
#define TRUNCATE(name, offset)                            \
  int name(int file, offset size) {                       \
    int done = REAL(int, #name, int, offset)(file, size); \
    if (done == 0) note_file('t', file, size, "", 0);     \
    return done;                                          \
  }
#define SYNC(name)                             \
  int name(int file) {                         \
    int done = REAL(int, #name, int)(file);    \
    if (done == 0) note_file('s', file, 0, "", 0); \
    return done;                               \
  }

OPEN(open)
OPEN(open64)
WRITE(pwrite, off_t)
WRITE(pwrite64, off64_t)
TRUNCATE(ftruncate, off_t)
TRUNCATE(ftruncate64, off64_t)
SYNC(fsync)
SYNC(fdatasync)

ssize_t write(int file, const void *from, size_t size) {
  off_t at = record < 0 ? 0 : lseek(file, 0, SEEK_CUR);
  ssize_t done = REAL(ssize_t, "write", int, const void *, size_t)(file, from, size);
  if (done > 0 && at >= 0) note_file('w', file, at, from, done);
  return done;
}

int unlink(const char *path) {
  int done = REAL(int, "unlink", const char *)(path);
  if (done == 0) note('u', path, 0, "", 0);
  return done;
}

int rename(const char *path, const char *to) {
  int done = REAL(int, "rename", const char *, const char *)(path, to);
  if (done == 0) note('r', path, 0, to, strlen(to));
  return done;
}
