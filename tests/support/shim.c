/* Preloaded into a test's child process: logs and fails the file calls that LMDB makes itself.

   The store's own calls go through FileIo, where Python stands in; LMDB (0.9.35 as its wheel has
   it) calls the C library: open, pwrite, writev, fdatasync, fsync, ftruncate on data.mdb. Meta pages
   are written through a second descriptor with O_DSYNC. It maps the file for reading only, so no
   byte gets there without one of these calls, and msync is never called. Calls on any other path
   pass untouched. FileIo's calls on data.mdb (the catalogue is grown so) pass through here too.

   Two variables name files; without one its half does nothing. tests/support/shim.py writes and
   reads both, and is how tests use this.

   KVSTORE_SHIM_CONTROL: mapped and shared, CONTROL_BYTES. For each kind of call a row of eight
   little-endian 64-bit words at 64 * kind:

       0 calls    how many were made so far, failed ones included; written here
       1 first    number of the first call that fails, from 1 on; 0: none
       2 count    how many fail from there on; all ones: every call until this is 0 again
       3 errno    of a call that fails
       4 short    not 0: such a write succeeds, but moves only so many bytes (at least one less
                  than it was asked for)
       5 failed   how many calls were failed or cut; written here

   Kinds: 0 a write of pages (pwrite, pwritev, write, writev), 1 a write of a meta page (O_DSYNC),
   2 a sync (fdatasync, fsync), 3 ftruncate.

   KVSTORE_SHIM_LOG: appended to, one entry for each thing that happened, in one order:

       u64 sequence  u32 kind  u32 bytes of name  u64 offset  u64 bytes of data   name   data

   Kinds: 1 a write, 2 a write that is durable itself (O_DSYNC), 3 a sync, 4 ftruncate (offset is
   the size), 5 the file was made. A write's entry comes before the write and a sync's after the
   sync, both under one lock: what an entry says is durable was durable at that point of the log.
   Python adds its own entries, of any kind, by calling kvstore_shim_log, so that there is one
   order over all files. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define CONTROL_BYTES 4096
#define WATCHED "data.mdb"
#define NAME_MAX_BYTES 4096

enum { PAGES, META, SYNC, TRUNCATE, KINDS };
enum { LOG_WRITE = 1, LOG_DURABLE_WRITE, LOG_SYNC, LOG_TRUNCATE, LOG_MADE };

struct row {
    uint64_t calls, first, count, error, cut, failed, unused[2];
};

struct entry {
    uint64_t sequence;
    uint32_t kind, name_bytes;
    uint64_t offset, bytes;
};

static struct row *rows;
static int log_fd = -1;
static uint64_t sequence;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

__attribute__((constructor)) static void start(void) {
    const char *control = getenv("KVSTORE_SHIM_CONTROL"), *log = getenv("KVSTORE_SHIM_LOG");
    if (control != NULL) {
        int fd = syscall(SYS_openat, AT_FDCWD, control, O_RDWR | O_CLOEXEC);
        if (fd >= 0) {
            void *map = mmap(NULL, CONTROL_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
            rows = map == MAP_FAILED ? NULL : map;
            syscall(SYS_close, fd);
        }
    }
    if (log != NULL)
        log_fd = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if ((control != NULL && rows == NULL) || (log != NULL && log_fd < 0)) {
        fprintf(stderr, "shim: cannot open the control file or the log\n");
        _exit(97);
    }
}

static int watched_name(const char *name) {
    size_t size = strlen(name), tail = strlen(WATCHED);
    return size > tail && strcmp(name + size - tail, WATCHED) == 0 && name[size - tail - 1] == '/';
}

/* The name of an open file that is watched; 0 for any other. */
static int watched(int fd, char *name) {
    char link[64];
    if (rows == NULL && log_fd < 0)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, name, NAME_MAX_BYTES - 1);
    if (size <= 0)
        return 0;
    name[size] = 0;
    return watched_name(name);
}

static void put(const struct iovec *parts, int count) {
    for (int at = 0; at < count; at++) {
        const char *from = parts[at].iov_base;
        size_t left = parts[at].iov_len;
        while (left > 0) {
            ssize_t done = syscall(SYS_write, log_fd, from, left);
            if (done <= 0)
                _exit(98);
            from += done;
            left -= done;
        }
    }
}

static void log_parts(uint32_t kind, const char *name, uint64_t offset, const struct iovec *parts,
                      int count) {
    if (log_fd < 0)
        return;
    struct entry entry = {++sequence, kind, strlen(name), offset, 0};
    for (int at = 0; at < count; at++)
        entry.bytes += parts[at].iov_len;
    struct iovec head[2] = {{&entry, sizeof entry}, {(void *)name, entry.name_bytes}};
    put(head, 2);
    put(parts, count);
}

/* For Python: one entry of its own. */
void kvstore_shim_log(uint32_t kind, const char *name, uint64_t offset, const void *data,
                      uint64_t bytes) {
    struct iovec part = {(void *)data, bytes};
    pthread_mutex_lock(&lock);
    log_parts(kind, name, offset, &part, 1);
    pthread_mutex_unlock(&lock);
}

/* What the plan says about the next call of a kind: 0 go on, -1 fail, else bytes to move at most. */
static int64_t plan(int kind, size_t size) {
    if (rows == NULL)
        return 0;
    struct row *row = &rows[kind];
    uint64_t number = __atomic_add_fetch(&row->calls, 1, __ATOMIC_SEQ_CST);
    uint64_t first = __atomic_load_n(&row->first, __ATOMIC_SEQ_CST);
    uint64_t count = __atomic_load_n(&row->count, __ATOMIC_SEQ_CST);
    if (first == 0 || number < first || number - first >= count)
        return 0;
    __atomic_add_fetch(&row->failed, 1, __ATOMIC_SEQ_CST);
    if (row->cut != 0 && size > 1)
        return row->cut < size ? (int64_t)row->cut : (int64_t)size - 1;
    errno = (int)row->error;
    return -1;
}

static ssize_t write_parts(int fd, const struct iovec *parts, int count, off_t offset, int placed) {
    char name[NAME_MAX_BYTES];
    if (!watched(fd, name))
        return placed ? syscall(SYS_pwritev, fd, parts, count, offset, 0)
                      : syscall(SYS_writev, fd, parts, count);
    int durable = (fcntl(fd, F_GETFL) & O_DSYNC) != 0;
    size_t size = 0;
    for (int at = 0; at < count; at++)
        size += parts[at].iov_len;
    pthread_mutex_lock(&lock);
    int64_t verdict = plan(durable ? META : PAGES, size);
    ssize_t done = -1;
    if (verdict >= 0) {
        struct iovec cut[count > 0 ? count : 1];
        memcpy(cut, parts, count * sizeof *parts);
        if (verdict > 0) {
            size_t left = verdict;
            int kept = 0;
            for (; kept < count && left > 0; kept++) {
                if (cut[kept].iov_len > left)
                    cut[kept].iov_len = left;
                left -= cut[kept].iov_len;
            }
            count = kept;
        }
        off_t at = placed ? offset : lseek(fd, 0, SEEK_CUR);
        /* A durable write is only maybe there until it has returned, as any other. */
        log_parts(LOG_WRITE, name, at, cut, count);
        done = placed ? syscall(SYS_pwritev, fd, cut, count, offset, 0)
                      : syscall(SYS_writev, fd, cut, count);
        if (durable && done > 0)
            log_parts(LOG_DURABLE_WRITE, name, at, cut, count);
    }
    pthread_mutex_unlock(&lock);
    return done;
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) {
    return write_parts(fd, parts, count, offset, 1);
}
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off_t offset) {
    return write_parts(fd, parts, count, offset, 1);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    struct iovec part = {(void *)data, size};
    return write_parts(fd, &part, 1, offset, 1);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off_t offset) {
    return pwrite(fd, data, size, offset);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    return write_parts(fd, parts, count, 0, 0);
}
ssize_t write(int fd, const void *data, size_t size) {
    struct iovec part = {(void *)data, size};
    return write_parts(fd, &part, 1, 0, 0);
}

static int sync_file(int fd, long call) {
    char name[NAME_MAX_BYTES];
    if (!watched(fd, name))
        return syscall(call, fd);
    pthread_mutex_lock(&lock);
    int done = -1;
    if (plan(SYNC, 0) >= 0) {
        done = syscall(call, fd);
        if (done == 0)
            log_parts(LOG_SYNC, name, 0, NULL, 0);
    }
    pthread_mutex_unlock(&lock);
    return done;
}

int fdatasync(int fd) { return sync_file(fd, SYS_fdatasync); }
int fsync(int fd) { return sync_file(fd, SYS_fsync); }

int ftruncate(int fd, off_t size) {
    char name[NAME_MAX_BYTES];
    if (!watched(fd, name))
        return syscall(SYS_ftruncate, fd, size);
    pthread_mutex_lock(&lock);
    int done = -1;
    if (plan(TRUNCATE, 0) >= 0) {
        log_parts(LOG_TRUNCATE, name, size, NULL, 0);
        done = syscall(SYS_ftruncate, fd, size);
    }
    pthread_mutex_unlock(&lock);
    return done;
}
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }

static int open_file(const char *name, int flags, int mode) {
    int making = log_fd >= 0 && (flags & O_CREAT) && watched_name(name) && access(name, F_OK) != 0;
    int fd = syscall(SYS_openat, AT_FDCWD, name, flags, mode);
    if (fd >= 0 && making)
        kvstore_shim_log(LOG_MADE, name, 0, NULL, 0);
    return fd;
}

int open(const char *name, int flags, ...) {
    va_list more;
    va_start(more, flags);
    int mode = (flags & (O_CREAT | __O_TMPFILE)) ? va_arg(more, int) : 0;
    va_end(more);
    return open_file(name, flags, mode);
}
int open64(const char *name, int flags, ...) {
    va_list more;
    va_start(more, flags);
    int mode = (flags & (O_CREAT | __O_TMPFILE)) ? va_arg(more, int) : 0;
    va_end(more);
    return open_file(name, flags, mode);
}
