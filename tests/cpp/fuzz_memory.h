// Random numbers, and memory of exactly the size that a call claims.
#ifndef TILESPARSE_TESTS_FUZZ_MEMORY_H_
#define TILESPARSE_TESTS_FUZZ_MEMORY_H_

#include <stdlib.h>
#include <tilesparse/tilesparse.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace fuzz {

__extension__ typedef __int128 wide;  // in which no size that is claimed overflows

inline uint64_t state;

inline uint64_t draw() {  // splitmix64
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}
inline int64_t draw(int64_t least, int64_t most) {
    return least + static_cast<int64_t>(draw() % static_cast<uint64_t>(most - least + 1));
}
inline bool calm = false;  // arguments stay valid: what is rare does not happen
inline bool chance(int percent) {
    const bool happens = draw(1, 100) <= percent;
    return calm ? percent >= 80 || (happens && percent > 15) : happens;
}
template <class T, size_t size>
inline T one_of(const T (&values)[size]) {
    return values[draw(0, size - 1)];
}

inline int64_t wild_number() {
    static constexpr int64_t kValues[] = {0,
                                          1,
                                          -1,
                                          2,
                                          3,
                                          4,
                                          5,
                                          7,
                                          8,
                                          15,
                                          16,
                                          17,
                                          32,
                                          48,
                                          64,
                                          100,
                                          128,
                                          256,
                                          4096,
                                          65535,
                                          65536,
                                          1 << 24,
                                          INT32_MAX,
                                          INT32_MIN,
                                          1ll << 31,
                                          1ll << 32,
                                          1ll << 47,
                                          1ll << 62,
                                          INT64_MAX,
                                          INT64_MIN,
                                          INT32_MAX / 128 * 128ll};
    return chance(80) ? one_of(kValues) : static_cast<int64_t>(draw());
}

// As good as endless for memory, and far from overflowing where it is multiplied.
inline int64_t bounded(int64_t number) { return std::clamp<int64_t>(number, -(1ll << 40), 1ll << 40); }

constexpr unsigned char kUntouched = 0x5a;
constexpr int64_t kMostBytes = 1 << 20;  // that are really given

struct Block {
    void* memory;
    unsigned char* data;
    size_t bytes;
};
inline std::vector<Block> blocks;  // freed after the call

// So many bytes and not one more, `shift` bytes behind an aligned address; null where they are too many.
inline unsigned char* take(wide bytes, size_t shift = 0) {
    if (bytes < 0 || bytes > kMostBytes) return nullptr;
    Block block{nullptr, nullptr, static_cast<size_t>(bytes)};
    if (posix_memalign(&block.memory, 256, block.bytes + shift) != 0) abort();
    block.data = static_cast<unsigned char*>(block.memory) + shift;
    std::memset(block.data, kUntouched, block.bytes);
    blocks.push_back(block);
    return block.data;
}

// The same, now and then misaligned or missing.
inline unsigned char* take_some(wide bytes) {
    if (chance(3)) return nullptr;
    static constexpr size_t kShifts[] = {1, 2, 4, 8, 16, 64};
    return take(bytes, chance(4) ? one_of(kShifts) : 0);
}

// For what no call may follow.
inline void* wild_address() {
    static constexpr uintptr_t kAddresses[] = {
        0, 1, 4, 16, 256, uintptr_t{1} << 40, UINTPTR_MAX - 255, UINTPTR_MAX};
    return reinterpret_cast<void*>(one_of(kAddresses));
}

// Memory of `take` that is as it was then.
inline bool is_untouched(const void* data) {
    for (const Block& block : blocks)
        if (block.data == data)
            return std::all_of(block.data, block.data + block.bytes,
                               [](unsigned char byte) { return byte == kUntouched; });
    return data == nullptr;
}

inline size_t held_at(const void* data) {
    for (const Block& block : blocks)
        if (block.data == data) return block.bytes;
    return 0;
}

// A structure as a caller of some version has it: of the size it says, or a size that is refused unread.
template <class T>
inline T* as_caller_has_it(T structure) {
    static constexpr uint32_t kOdd[] = {0,   1,   4,   8,   87,  88,  89,  100, 115,
                                        116, 117, 160, 216, 352, 503, 504, 505, 512};
    uint32_t size = sizeof(T);
    if (chance(10)) size = one_of(kOdd);
    if (chance(4)) size = sizeof(T) + static_cast<uint32_t>(draw(1, 100));
    if (chance(2)) size = static_cast<uint32_t>(wild_number());
    if (chance(1)) return nullptr;
    structure.struct_size = size;
    const size_t held = std::max<size_t>(std::min<size_t>(size, 8192), sizeof(uint32_t));
    unsigned char* const data = take(held, chance(2) ? 4 : 0);
    std::memset(data, 0, held);
    std::memcpy(data, &structure, std::min(held, sizeof(T)));
    if (held > sizeof(T) && chance(50)) data[draw(sizeof(T), static_cast<int64_t>(held) - 1)] = 1;
    return reinterpret_cast<T*>(data);
}

}  // namespace fuzz

#endif  // TILESPARSE_TESTS_FUZZ_MEMORY_H_
