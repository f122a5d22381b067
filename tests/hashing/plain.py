"""The hashes of kvstore.hashing once more, in plain Python from their specifications.

Shares no code with the product and needs no package, so any Python can run it:
`python tests/hashing/plain.py golden.json` computes every vector of the file and prints what
differs; exit code 1 if anything does.
"""

import hashlib
import json
import struct
import sys

MASK = (1 << 64) - 1
P32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
P64 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
MX1, MX2 = 0x165667919E3779F9, 0x9FB21C651E98DF25
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def words(data):
    return struct.unpack(f"<{len(data) // 8}Q", data)


def u64(data, at):
    return int.from_bytes(data[at : at + 8], "little")


def u32(data, at):
    return int.from_bytes(data[at : at + 4], "little")


def fold(a, b):
    return (a * b & MASK) ^ (a * b >> 64)


def avalanche(h):
    h &= MASK
    h = (h ^ h >> 37) * MX1 & MASK
    return h ^ h >> 32


def avalanche_short(h):
    h = (h ^ h >> 33) * P64[1] & MASK
    h = (h ^ h >> 29) * P64[2] & MASK
    return h ^ h >> 32


def mix(data, at, secret_at):
    return fold(
        u64(data, at) ^ u64(SECRET, secret_at), u64(data, at + 8) ^ u64(SECRET, secret_at + 8)
    )


def mix_pair(acc, data, a, b, secret_at):
    low, high = acc
    low = low + mix(data, a, secret_at) & MASK
    low ^= u64(data, b) + u64(data, b + 8) & MASK
    high = high + mix(data, b, secret_at + 16) & MASK
    high ^= u64(data, a) + u64(data, a + 8) & MASK
    return low, high


def accumulate(lanes, stripe, secret):
    keys = words(secret)
    for lane, value in enumerate(words(stripe)):
        key = keys[lane] ^ value
        lanes[lane ^ 1] = lanes[lane ^ 1] + value & MASK
        lanes[lane] = lanes[lane] + (key & 0xFFFFFFFF) * (key >> 32) & MASK


def lanes_of(data):
    lanes = [P32[2], P64[0], P64[1], P64[2], P64[3], P32[1], P64[4], P32[0]]
    stripes = (len(data) - 1) // 64
    for stripe in range(stripes):
        at = stripe % 16 * 8
        accumulate(lanes, data[64 * stripe : 64 * stripe + 64], SECRET[at : at + 64])
        if stripe % 16 == 15:
            keys = words(SECRET[128:192])
            lanes = [(v ^ v >> 47 ^ keys[i]) * P32[0] & MASK for i, v in enumerate(lanes)]
    accumulate(lanes, data[-64:], SECRET[121:185])
    return lanes


def merge(lanes, secret_at, start):
    for pair in range(4):
        at = secret_at + 16 * pair
        a, b = lanes[2 * pair] ^ u64(SECRET, at), lanes[2 * pair + 1] ^ u64(SECRET, at + 8)
        start += fold(a, b)
    return avalanche(start)


def xxh3_64_short(data):
    n = len(data)
    if n == 0:
        return avalanche_short(u64(SECRET, 56) ^ u64(SECRET, 64))
    if n <= 3:
        joined = data[0] << 16 | data[n >> 1] << 24 | data[-1] | n << 8
        return avalanche_short(joined ^ u32(SECRET, 0) ^ u32(SECRET, 4))
    if n <= 8:
        h = u32(data, n - 4) + (u32(data, 0) << 32)
        h ^= u64(SECRET, 8) ^ u64(SECRET, 16)
        h ^= (h << 49 | h >> 15) & MASK ^ (h << 24 | h >> 40) & MASK
        h = h * MX2 & MASK
        h = (h ^ (h >> 35) + n) * MX2 & MASK
        return h ^ h >> 28
    low = u64(data, 0) ^ u64(SECRET, 24) ^ u64(SECRET, 32)
    high = u64(data, n - 8) ^ u64(SECRET, 40) ^ u64(SECRET, 48)
    return avalanche(n + int.from_bytes(low.to_bytes(8, "big"), "little") + high + fold(low, high))


def xxh3_64(data):
    n = len(data)
    if n <= 16:
        return xxh3_64_short(data)
    h = n * P64[0]
    if n <= 128:
        for i in range((n - 1) // 32 + 1):
            h += mix(data, 16 * i, 32 * i) + mix(data, n - 16 * (i + 1), 32 * i + 16)
        return avalanche(h)
    if n <= 240:
        h = avalanche(h + sum(mix(data, 16 * i, 16 * i) for i in range(8)))
        h += sum(mix(data, 16 * i, 16 * (i - 8) + 3) for i in range(8, n // 16))
        return avalanche(h + mix(data, n - 16, 119))
    return merge(lanes_of(data), 11, n * P64[0])


def xxh3_128(data):
    """The digest of 17 bytes or more."""
    n = len(data)
    if n > 240:
        lanes = lanes_of(data)
        low, high = merge(lanes, 11, n * P64[0]), merge(lanes, 117, ~(n * P64[1]) & MASK)
        return struct.pack(">QQ", high, low)
    acc = (n * P64[0] & MASK, 0)
    if n <= 128:
        for i in reversed(range((n - 1) // 32 + 1)):
            acc = mix_pair(acc, data, 16 * i, n - 16 * (i + 1), 32 * i)
    else:
        for i in range(0, 128, 32):
            acc = mix_pair(acc, data, i, i + 16, i)
        acc = (avalanche(acc[0]), avalanche(acc[1]))
        for i in range(128, n - 31, 32):
            acc = mix_pair(acc, data, i, i + 16, i - 125)
        acc = mix_pair(acc, data, n - 16, n - 32, 103)
    low, high = acc
    top = -avalanche(low * P64[0] + high * P64[3] + n * P64[1]) & MASK
    return struct.pack(">QQ", top, avalanche(low + high))


def frame(data, width):
    return len(data).to_bytes(width, "little") + data


def namespace(fields):
    framed = b"".join(frame(name.encode(), 4) + frame(value, 8) for name, value in fields)
    start = b"kvstore namespace v1\0" + len(fields).to_bytes(4, "little")
    return hashlib.sha256(start + framed).digest()


def root(digest):
    return hashlib.sha256(b"kvstore root key v1\0" + digest).digest()[:16]


def chain(hash_name, parent, blocks, media):
    keys = []
    for i, tokens in enumerate(blocks):
        data = parent + struct.pack(f"<{len(tokens)}i", *tokens) + media.get(i, b"")
        parent = xxh3_128(data) if hash_name == "xxh3-128" else hashlib.sha256(data).digest()[:16]
        keys.append(parent)
    return keys


def golden_bytes(n):
    """The bytes that the checksum vectors are of."""
    return bytes((i * i + 31 * i) % 251 for i in range(n))


def golden_tokens(blocks, block_tokens):
    """The tokens that the chain vectors are of: all of int32 that a tokenizer may give."""
    flat = [i * 2654435761 % (1 << 31) for i in range(blocks * block_tokens)]
    return [flat[i * block_tokens : (i + 1) * block_tokens] for i in range(blocks)]


def compute(vectors):
    """The file's vectors with every result computed anew."""
    namespaces, chains = [], []
    for row in vectors["namespaces"]:
        digest = namespace([(name, bytes.fromhex(value)) for name, value in row["fields"]])
        namespaces.append(dict(row, digest=digest.hex(), root=root(digest).hex()))
    for row in vectors["chains"]:
        blocks = golden_tokens(row["blocks"], row["block_tokens"])
        media = {int(i): bytes.fromhex(value) for i, value in row["media"].items()}
        keys = chain(row["hash"], bytes.fromhex(row["parent"]), blocks, media)
        chains.append(dict(row, keys=[key.hex() for key in keys]))
    sums = [
        dict(row, xxh3_64=f"{xxh3_64(golden_bytes(row['length'])):016x}")
        for row in vectors["checksums"]
    ]
    return {"namespaces": namespaces, "chains": chains, "checksums": sums}


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        vectors = json.load(file)
    computed = compute(vectors)
    for kind, rows in vectors.items():
        for i, row in enumerate(rows):
            if row != computed[kind][i]:
                print(f"{kind} {i}: {row} is computed as {computed[kind][i]}")
    print(json.dumps(sys.version_info[:2]))
    sys.exit(vectors != computed)


if __name__ == "__main__":
    main()
