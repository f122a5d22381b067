// Reads a record and checks it, in one call: no Python between the device and the checksums.
#include <errno.h>
#include <unistd.h>

#include "xxh3.hpp"

extern "C" {

// What kv_read_record returns beside -errno. A run that fails is RECORD_BAD_RUN + its index.
enum { RECORD_GOOD = 0, RECORD_SHORT = 1, RECORD_BAD_HEADER = 2, RECORD_BAD_RUN = 16 };

// Where a record of one layout has what; tiers/record_read.py fills it in the same order.
struct RecordShape {
    int64_t size;
    int64_t header_bytes;
    int64_t header_checksum_at;
    int64_t checksums_at;
    int64_t runs;
    const int64_t* run_offsets;
    const int64_t* run_lengths;
    const uint8_t* fixed;  // What the header's fixed fields must be,
    const uint8_t* mask;   // and 0xff for the bytes of `fixed` that count.
    int64_t fixed_bytes;
};

static int64_t read_all(int fd, uint8_t* buffer, int64_t size, int64_t offset) {
    int64_t done = 0;
    while (done < size) {
        // An O_DIRECT read that ended in the middle of a page has met the end of the file.
        if (done % 4096 != 0) return RECORD_SHORT;
        const ssize_t got = pread(fd, buffer + done, size - done, offset + done);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return -errno;
        if (got == 0) return RECORD_SHORT;
        done += got;
    }
    return RECORD_GOOD;
}

// Fills buffer with shape->size bytes of fd from `offset` and checks the record in it: the fixed
// fields, the header's checksum (its own 8 bytes count as zero), then XXH3-64 of every run of the
// payload against the uint64 [runs] in the header. Trusts no field of the header.
int64_t kv_read_record(int fd, int64_t offset, uint8_t* buffer, const RecordShape* shape) {
    const int64_t fault = read_all(fd, buffer, shape->size, offset);
    if (fault != RECORD_GOOD) return fault;
    for (int64_t i = 0; i < shape->fixed_bytes; i++)
        if ((buffer[i] ^ shape->fixed[i]) & shape->mask[i]) return RECORD_BAD_HEADER;
    uint64_t stated;
    memcpy(&stated, buffer + shape->header_checksum_at, 8);
    memset(buffer + shape->header_checksum_at, 0, 8);
    const uint64_t found = xxh3::hash64(buffer, shape->header_bytes);
    memcpy(buffer + shape->header_checksum_at, &stated, 8);
    if (found != stated) return RECORD_BAD_HEADER;
    const uint8_t* payload = buffer + shape->header_bytes;
    for (int64_t run = 0; run < shape->runs; run++) {
        uint64_t expected;
        memcpy(&expected, buffer + shape->checksums_at + 8 * run, 8);
        if (xxh3::hash64(payload + shape->run_offsets[run], shape->run_lengths[run]) != expected)
            return RECORD_BAD_RUN + run;
    }
    return RECORD_GOOD;
}

}
