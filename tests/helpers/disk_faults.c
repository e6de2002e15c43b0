/* Calls of the C library that fail for files below some folders: see disk_faults.py.

   DISK_BELOW    folders, separated by colons; calls for other files are passed on
   DISK_LOG      a file that receives a line "kind path" for each call; where calls are to fail, "FAULT kind path" for each that does
   DISK_KIND     kind of the calls that fail; none: no call fails
   DISK_AT       number of the first call of this kind that fails, from 0
   DISK_LAST     number of the last one; none: the same
   DISK_ERRNO    its error number; 0: it transfers half of the bytes
   DISK_NO_FALLOCATE  set: no file system can reserve space
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN, CREATE, READ, WRITE, FSYNC, FTRUNCATE, FALLOCATE, CLOSE, RELEASE, RENAME, LINK, UNLINK, KINDS };
static const char *const NAMES[KINDS] = {"open", "create", "read", "write", "fsync", "ftruncate", "fallocate",
                                         "close", "release", "rename", "link", "unlink"};
static int counts[KINDS];

#define NEXT(name) ({ static __typeof__(&name) next; if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name); next; })

static int is_below(const char *path) {
  const char *folder = getenv("DISK_BELOW");
  while (folder && *folder) {
    size_t n = strcspn(folder, ":");
    if (n && !strncmp(path, folder, n) && (path[n] == '/' || !path[n])) return 1;
    folder += n + (folder[n] == ':');
  }
  return 0;
}

static void note(const char *what, const char *kind, const char *path) {
  const char *name = getenv("DISK_LOG");
  char line[PATH_MAX + 64];
  if (!name) return;
  int fd = syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  int n = snprintf(line, sizeof line, "%s%s %s\n", what, kind, path);
  if (fd >= 0) {
    syscall(SYS_write, fd, line, n);
    syscall(SYS_close, fd);
  }
}

static int number(const char *name, int other) {
  const char *text = getenv(name);
  return text ? atoi(text) : other;
}

/* Whether a call fails: -1 no, 0 it transfers half, else its error number. */
static int fault(int kind, const char *path) {
  if (!is_below(path)) return -1;
  int n = __sync_fetch_and_add(&counts[kind], 1), at = number("DISK_AT", 0);
  const char *wanted = getenv("DISK_KIND");
  if (!wanted) note("", NAMES[kind], path);
  if (kind == FALLOCATE && getenv("DISK_NO_FALLOCATE")) return EOPNOTSUPP;
  if (!wanted || strcmp(wanted, NAMES[kind]) || n < at || n > number("DISK_LAST", at)) return -1;
  note("FAULT ", NAMES[kind], path);
  return number("DISK_ERRNO", EIO);
}

static int fault_at(int kind, int folder, const char *path) {
  char whole[2 * PATH_MAX], link[64];
  if (!getenv("DISK_BELOW")) return -1;
  if (path[0] == '/') return fault(kind, path);
  ssize_t n = -1;
  if (folder == AT_FDCWD) n = readlink("/proc/self/cwd", whole, PATH_MAX);
  else {
    snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    n = readlink(link, whole, PATH_MAX);
  }
  if (n < 0) return -1;
  snprintf(whole + n, PATH_MAX, "%s%s", *path ? "/" : "", path);
  return fault(kind, whole);
}

static int fault_of(int kind, int fd) {
  int before = errno, found = getenv("DISK_BELOW") ? fault_at(kind, fd, "") : -1;
  errno = before;
  return found;
}

#define FAIL(found, result) do { int code = (found); if (code > 0) { errno = code; return result; } } while (0)

#define OPENS(name)                                                                        \
  int name(const char *path, int flags, ...) {                                             \
    va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
    FAIL(fault_at(flags & O_CREAT ? CREATE : OPEN, AT_FDCWD, path), -1);                   \
    return NEXT(name)(path, flags, mode);                                                  \
  }
OPENS(open)
OPENS(open64)
#define OPENS_AT(name)                                                                     \
  int name(int folder, const char *path, int flags, ...) {                                 \
    va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
    FAIL(fault_at(flags & O_CREAT ? CREATE : OPEN, folder, path), -1);                     \
    return NEXT(name)(folder, path, flags, mode);                                          \
  }
OPENS_AT(openat)
OPENS_AT(openat64)

#define HALF(kind) int found = fault_of(kind, fd); FAIL(found, -1); if (found == 0 && n > 1) n /= 2;
ssize_t read(int fd, void *b, size_t n) { HALF(READ) return NEXT(read)(fd, b, n); }
ssize_t pread(int fd, void *b, size_t n, off_t at) { HALF(READ) return NEXT(pread)(fd, b, n, at); }
ssize_t pread64(int fd, void *b, size_t n, off64_t at) { HALF(READ) return NEXT(pread64)(fd, b, n, at); }
ssize_t write(int fd, const void *b, size_t n) { HALF(WRITE) return NEXT(write)(fd, b, n); }
ssize_t pwrite(int fd, const void *b, size_t n, off_t at) { HALF(WRITE) return NEXT(pwrite)(fd, b, n, at); }
ssize_t pwrite64(int fd, const void *b, size_t n, off64_t at) { HALF(WRITE) return NEXT(pwrite64)(fd, b, n, at); }

/* A vector that is cut is one vector of half of the bytes of the first. */
#define VECTOR(kind) struct iovec half; int found = fault_of(kind, fd); FAIL(found, -1); \
  if (found == 0 && v->iov_len > 1) { half = *v; half.iov_len /= 2; v = &half; n = 1; }
ssize_t readv(int fd, const struct iovec *v, int n) { VECTOR(READ) return NEXT(readv)(fd, v, n); }
ssize_t preadv(int fd, const struct iovec *v, int n, off_t at) { VECTOR(READ) return NEXT(preadv)(fd, v, n, at); }
ssize_t preadv64(int fd, const struct iovec *v, int n, off64_t at) { VECTOR(READ) return NEXT(preadv64)(fd, v, n, at); }
ssize_t writev(int fd, const struct iovec *v, int n) { VECTOR(WRITE) return NEXT(writev)(fd, v, n); }
ssize_t pwritev(int fd, const struct iovec *v, int n, off_t at) { VECTOR(WRITE) return NEXT(pwritev)(fd, v, n, at); }
ssize_t pwritev64(int fd, const struct iovec *v, int n, off64_t at) { VECTOR(WRITE) return NEXT(pwritev64)(fd, v, n, at); }
/* With RWF_NOWAIT a read only looks at the page cache, and may always be refused. */
ssize_t preadv2(int fd, const struct iovec *v, int n, off_t at, int flags) { VECTOR(READ) return NEXT(preadv2)(fd, v, n, at, flags); }
ssize_t preadv64v2(int fd, const struct iovec *v, int n, off64_t at, int flags) { VECTOR(READ) return NEXT(preadv64v2)(fd, v, n, at, flags); }

int fsync(int fd) { FAIL(fault_of(FSYNC, fd), -1); return NEXT(fsync)(fd); }
int fdatasync(int fd) { FAIL(fault_of(FSYNC, fd), -1); return NEXT(fdatasync)(fd); }
int ftruncate(int fd, off_t n) { FAIL(fault_of(FTRUNCATE, fd), -1); return NEXT(ftruncate)(fd, n); }
int ftruncate64(int fd, off64_t n) { FAIL(fault_of(FTRUNCATE, fd), -1); return NEXT(ftruncate64)(fd, n); }
int truncate(const char *p, off_t n) { FAIL(fault_at(FTRUNCATE, AT_FDCWD, p), -1); return NEXT(truncate)(p, n); }
int truncate64(const char *p, off64_t n) { FAIL(fault_at(FTRUNCATE, AT_FDCWD, p), -1); return NEXT(truncate64)(p, n); }
int fallocate(int fd, int mode, off_t at, off_t n) { FAIL(fault_of(FALLOCATE, fd), -1); return NEXT(fallocate)(fd, mode, at, n); }
int fallocate64(int fd, int mode, off64_t at, off64_t n) { FAIL(fault_of(FALLOCATE, fd), -1); return NEXT(fallocate64)(fd, mode, at, n); }
int posix_fallocate(int fd, off_t at, off_t n) { int e = fault_of(FALLOCATE, fd); return e > 0 ? e : NEXT(posix_fallocate)(fd, at, n); }
int posix_fallocate64(int fd, off64_t at, off64_t n) { int e = fault_of(FALLOCATE, fd); return e > 0 ? e : NEXT(posix_fallocate64)(fd, at, n); }

/* The descriptor is closed also where the call fails, as on Linux. "release" is the end of a file that was only read. */
int close(int fd) {
  int flags = fcntl(fd, F_GETFL), e = fault_of((flags & O_ACCMODE) == O_RDONLY ? RELEASE : CLOSE, fd), done = NEXT(close)(fd);
  FAIL(e, -1);
  return done;
}

int rename(const char *a, const char *b) { FAIL(fault_at(RENAME, AT_FDCWD, b), -1); return NEXT(rename)(a, b); }
int renameat(int d, const char *a, int f, const char *b) { FAIL(fault_at(RENAME, f, b), -1); return NEXT(renameat)(d, a, f, b); }
int renameat2(int d, const char *a, int f, const char *b, unsigned o) { FAIL(fault_at(RENAME, f, b), -1); return NEXT(renameat2)(d, a, f, b, o); }
int link(const char *a, const char *b) { FAIL(fault_at(LINK, AT_FDCWD, b), -1); return NEXT(link)(a, b); }
int linkat(int d, const char *a, int f, const char *b, int o) { FAIL(fault_at(LINK, f, b), -1); return NEXT(linkat)(d, a, f, b, o); }
int symlink(const char *a, const char *b) { FAIL(fault_at(LINK, AT_FDCWD, b), -1); return NEXT(symlink)(a, b); }
int symlinkat(const char *a, int f, const char *b) { FAIL(fault_at(LINK, f, b), -1); return NEXT(symlinkat)(a, f, b); }
int unlink(const char *p) { FAIL(fault_at(UNLINK, AT_FDCWD, p), -1); return NEXT(unlink)(p); }
int unlinkat(int d, const char *p, int o) { FAIL(fault_at(UNLINK, d, p), -1); return NEXT(unlinkat)(d, p, o); }
int mkdir(const char *p, mode_t m) { FAIL(fault_at(CREATE, AT_FDCWD, p), -1); return NEXT(mkdir)(p, m); }
