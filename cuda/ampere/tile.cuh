// One operand's tile in shared memory, its swizzle, and the fragments warps read from it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ampere/async.cuh"
#include "ampere/math.cuh"
#include "common/problem.h"

namespace ts::sm80 {

constexpr int kLineBytes = 128;
constexpr int kChunkBytes = 16;
constexpr int kChunksPerLine = kLineBytes / kChunkBytes;
constexpr int kQuarters = 4;  // of a step: k of one mma each

constexpr int log2_of(int power) { return power == 1 ? 0 : 1 + log2_of(power / 2); }

// `kExtent` tokens or features by one step of k, 128 bytes of it. Lines of 128 bytes in chunks of 16:
//  - contiguous k: [kExtent][kStep of k], a line is one token or feature, its chunks are along k;
//  - otherwise [kPanels][kStep of k][kPanelExtent], a line is one element of k and its chunks are along
//    the extent; an extent of more than 128 bytes takes several panels of such lines.
// Chunks are permuted in each line, so that neither the copies nor the fragment loads have bank conflicts.
template <class Element, int kExtent, bool kContiguousK>
struct Tile {
    static constexpr bool kIsContiguousK = kContiguousK;
    static constexpr int kChunk = kChunkBytes / sizeof(Element);
    static constexpr int kStep = kLineBytes / sizeof(Element);
    static constexpr int kPanelExtent = kContiguousK ? kExtent : kStep;
    static constexpr int kPanels = (kExtent + kPanelExtent - 1) / kPanelExtent;
    static constexpr int kLines = kContiguousK ? kExtent : kStep;  // of a panel
    static constexpr int kPanelBytes = kLines * kLineBytes;
    static constexpr int kBytes = kPanels * kPanelBytes;

    __device__ static uint32_t offset(int line, int chunk) {
        return line * kLineBytes + (chunk ^ swizzle(line)) * kChunkBytes;
    }
    __device__ static int swizzle(int line) {
        // Fragments of 8-byte elements, and of 4-byte ones along the extent, are read by 4 lines x 2 chunks
        // at once.
        return sizeof(Element) == 8 || (!kContiguousK && sizeof(Element) == 4) ? (line & 3) << 1 : line & 7;
    }
};

// Steps ahead that a ring is filled at most. Those in float64 take so long that fewer suffice, and warps may
// be further apart: 4 to 7 % faster on an H200.
template <class Element>
constexpr int kMostAhead = sizeof(Element) == 8 ? 3 : 8;

// True for blocks that 8 warps multiply faster than 16 in float32, as an H200 does.
template <class Traits>
bool are_too_wide(const Problem& problem) {
    return Traits::kWarps == 16 && sizeof(typename Traits::Input) == 4 && problem.pattern.block_rows > 32 &&
           problem.pattern.block_cols > 32;
}
constexpr const char* kTooWide = "its warps are for blocks with a side of 16 or 32";

// How many threads, eight to a line, share the lines of a tile: a thread's lines and panels are so many
// apart.
template <class Tile, int kThreads>
struct Shares {
    static constexpr int kLinesAtOnce = std::min(kThreads / kChunksPerLine, Tile::kLines);
    static constexpr int kPanelsAtOnce = kThreads / kChunksPerLine / kLinesAtOnce;
    static constexpr int kOwnLines = Tile::kLines / kLinesAtOnce;
    static constexpr int kOwnPanels = Tile::kPanels / kPanelsAtOnce;
    static_assert(kOwnPanels * kPanelsAtOnce == Tile::kPanels);

    __device__ static int line() { return threadIdx.x / kChunksPerLine % kLinesAtOnce; }
    __device__ static int panel() {
        return kPanelsAtOnce == 1 ? 0 : threadIdx.x / (kChunksPerLine * kLinesAtOnce);
    }
};

enum class Side { a, b };

// Reads a warp's fragments of a tile, kTiles of 16 rows (tokens or features): the matrices of 8 rows x
// 16 bytes of k that mma.sync wants, 2 x 2 of them at a time. Operand A has those of one k first,
// operand B those of one row. What depends on the lane is computed once.
template <class Tile, class Element, Side kSide, int kTiles>
class Reader {
    static constexpr bool kContiguousK = Tile::kIsContiguousK;
    static constexpr bool kWords = !kContiguousK && sizeof(Element) == 4;  // cannot be transposed by ldmatrix
    static constexpr bool kDoubles = sizeof(Element) == 8;  // of which a quarter has half of a matrix's k

  public:
    __device__ Reader(int first, int lane) {
        const int low = lane / 8 % 2, high = lane / 16;
        const int next_row = kSide == Side::a ? low : high, next_k = kSide == Side::a ? high : low;
#pragma unroll
        for (int i = 0; i < (kContiguousK ? 1 : kTiles); ++i) {
            const int panel = (first + 16 * i) / Tile::kPanelExtent,
                      row = (first + 16 * i) % Tile::kPanelExtent;
            if constexpr (kDoubles && kContiguousK)
                offsets_[i] = Tile::offset(row + lane / 4, lane % 4 / Tile::kChunk) + lane % Tile::kChunk * 8;
            else if constexpr (kDoubles)
                offsets_[i] =
                    Tile::offset(lane % 4, (row + lane / 4) / Tile::kChunk) + lane / 4 % Tile::kChunk * 8;
            else if constexpr (kWords)
                offsets_[i] = Tile::offset(lane % 4, (row + lane / 4) / Tile::kChunk) + lane / 4 % 4 * 4;
            else if constexpr (kContiguousK)
                offsets_[i] = Tile::offset(row + next_row * 8 + lane % 8, next_k);
            else
                offsets_[i] = Tile::offset(next_k * 8 + lane % 8, row / Tile::kChunk + next_row);
            offsets_[i] += panel * Tile::kPanelBytes;
        }
    }

    // The fragments of rows 16 * i to 16 * i + 15 after the warp's first, at a quarter of the step.
    __device__ Fragment<4> load(uint32_t tile, int i, int quarter) const {
        const uint32_t k = quarter * (Tile::kStep / kQuarters) * kLineBytes;
        // The two chunks of a quarter are reached by exclusive or, as the lines' permutation is one.
        if constexpr (kDoubles && kContiguousK)
            return load_doubles<8 * kLineBytes>((tile + offsets_[0] ^ 2 * quarter * kChunkBytes) +
                                                16 * i * kLineBytes);
        else if constexpr (kDoubles)
            return load_doubles<8 / Tile::kChunk * kChunkBytes>(tile + offsets_[i] + k);
        else if constexpr (kContiguousK)
            return load_matrices<false>((tile + offsets_[0] ^ 2 * quarter * kChunkBytes) +
                                        16 * i * kLineBytes);
        else if constexpr (kWords)
            return load_words(tile + offsets_[i], k);
        else
            return load_matrices<true>(tile + offsets_[i] + k);
    }

  private:
    // Of rows r and r + 8, which are so many bytes apart.
    template <int kNextRow>
    __device__ static Fragment<4> load_doubles(uint32_t address) {
        Fragment<4> to;
#pragma unroll
        for (int i = 0; i < 2; ++i)
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                         : "=r"(to.value[2 * i]), "=r"(to.value[2 * i + 1])
                         : "r"(kContiguousK ? address + i * kNextRow : address ^ i * kNextRow));
        return to;
    }
    __device__ static Fragment<4> load_words(uint32_t address, uint32_t offset) {
        Fragment<4> to;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int next_row = kSide == Side::a ? i % 2 : i / 2, next_k = kSide == Side::a ? i / 2 : i % 2;
            asm volatile("ld.shared.u32 %0, [%1];"
                         : "=r"(to.value[i])
                         : "r"((address ^ next_row * 2 * kChunkBytes) + offset + next_k * 4 * kLineBytes));
        }
        return to;
    }

    uint32_t offsets_[kContiguousK ? 1 : kTiles];
};

// Sums of one warp: kMTiles x kNTiles tiles of 16 x 16.
template <class Sum, int kMTiles, int kNTiles>
using Accumulators = Sum[kMTiles][kNTiles][2][4];

// Operand A of one instruction, which begins at a quarter and takes `Math::kQuarters` of them.
template <class Math, class Reader>
__device__ inline auto load_a(const Reader& read, uint32_t tile, int i, int quarter) {
    Fragment<4 * Math::kQuarters> all;
#pragma unroll
    for (int q = 0; q < Math::kQuarters; ++q) {
        const Fragment<4> raw = read.load(tile, i, quarter + q);
#pragma unroll
        for (int j = 0; j < 4; ++j) all.value[4 * q + j] = raw.value[j];
    }
    return Math::prepare(all);
}

// Likewise operand B of two, of 8 rows each, as multiplied where `use(half, operand)` says so.
template <class Math, class Reader, class Use>
__device__ inline void load_b(const Reader& read, uint32_t tile, int i, int quarter, Use use) {
    Fragment<2 * Math::kQuarters> halves[2];
#pragma unroll
    for (int q = 0; q < Math::kQuarters; ++q) {
        const Fragment<4> raw = read.load(tile, i, quarter + q);
#pragma unroll
        for (int j = 0; j < 4; ++j) halves[j / 2].value[2 * q + j % 2] = raw.value[j];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) use(half, Math::prepare(halves[half]));
}

// The instructions of a quarter, or of several, for the 16-wide tiles of B whose bit 4 * tile is set in
// `present`.
template <class Math, bool kAll, class Sum, int kMTiles, int kNTiles, class ReaderA, class ReaderB>
__device__ inline void multiply_quarter(Accumulators<Sum, kMTiles, kNTiles>& sums, const ReaderA& read_a,
                                        uint32_t tile_a, const ReaderB& read_b, uint32_t tile_b, int quarter,
                                        uint32_t present) {
    typename Math::template Operand<4 * Math::kQuarters> a[kMTiles];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) a[m] = load_a<Math>(read_a, tile_a, m, quarter);
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
        if (!kAll && !(present >> 4 * n & 1)) continue;
        load_b<Math>(read_b, tile_b, n, quarter, [&](int half, const auto& b) {
#pragma unroll
            for (int i = 0; i < kMTiles; ++i) {
                // Back and forth, so that neighbouring products share a: 3 % faster on an H200.
                const int m = half == 0 ? i : kMTiles - 1 - i;
                Math::mma(sums[m][n][half], a[m], b);
            }
        });
    }
}

// One step of instructions that take several quarters, for the tiles of 16 x 16 that `has(m, n)` says. Calls
// `release` when the operands are in registers: other warps may copy into the stage while these are
// multiplied.
template <class Math, class Sum, int kMTiles, int kNTiles, class ReaderA, class ReaderB, class Has,
          class Release>
__device__ inline void multiply_long(Accumulators<Sum, kMTiles, kNTiles>& sums, const ReaderA& read_a,
                                     uint32_t tile_a, const ReaderB& read_b, uint32_t tile_b, Has has,
                                     Release release) {
#pragma unroll
    for (int quarter = 0; quarter < kQuarters; quarter += Math::kQuarters) {
        typename Math::template Operand<4 * Math::kQuarters> a[kMTiles];
        typename Math::template Operand<2 * Math::kQuarters> b[kNTiles][2];
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) a[m] = load_a<Math>(read_a, tile_a, m, quarter);
#pragma unroll
        for (int n = 0; n < kNTiles; ++n)
            load_b<Math>(read_b, tile_b, n, quarter,
                         [&](int half, const auto& of_half) { b[n][half] = of_half; });
        if (quarter + Math::kQuarters == kQuarters) release();
#pragma unroll
        for (int n = 0; n < kNTiles; ++n)
#pragma unroll
            for (int i = 0; i < kMTiles; ++i) {
                const int m = n % 2 == 0 ? i : kMTiles - 1 - i;
                if (!has(m, n)) continue;
                Math::mma(sums[m][n][0], a[m], b[n][0]);
                Math::mma(sums[m][n][1], a[m], b[n][1]);
            }
    }
}

struct NoScales {};

// Runs `multiply(sums)` for one step, as the accumulation policy has it. `scales`: of scaled sums, for the
// two rows of each 16 of which a thread has sums.
template <class Math, class Sum, int kMTiles, int kNTiles, class Multiply, class Scales = NoScales>
__device__ inline void accumulate(Accumulators<Sum, kMTiles, kNTiles>& sums, Multiply multiply,
                                  const Scales& scales = {}) {
    if constexpr (Math::kAccumulation == Accumulation::kept) {
        multiply(sums);
    } else {
        Accumulators<Sum, kMTiles, kNTiles> step = {};
        multiply(step);
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int i = 0; i < 8 * kNTiles; ++i) {
                Sum& sum = sums[m][i / 8][i / 4 % 2][i % 4];
                const Sum of_step = step[m][i / 8][i / 4 % 2][i % 4];
                if constexpr (Math::kAccumulation == Accumulation::scaled)
                    sum = fmaf(of_step, scales.of[m][i / 2 % 2], sum);
                else
                    sum += of_step;
            }
    }
}

// One step with every tile present: a straight line, which the compiler can pipeline.
template <class Math, class Sum, int kMTiles, int kNTiles, class ReaderA, class ReaderB>
__device__ inline void multiply_all(Accumulators<Sum, kMTiles, kNTiles>& sums, const ReaderA& read_a,
                                    uint32_t tile_a, const ReaderB& read_b, uint32_t tile_b) {
#pragma unroll
    for (int quarter = 0; quarter < kQuarters; quarter += Math::kQuarters)
        multiply_quarter<Math, true>(sums, read_a, tile_a, read_b, tile_b, quarter, 0);
}

// `present` of a step in which every tile of a warp has a block.
template <int kNTiles>
constexpr uint32_t kAllPresent = kNTiles == 8 ? 0xffffffffu : (1u << 4 * kNTiles % 32) - 1;

// One step. `present` has bit 4 * tile + quarter for each 16-wide tile of B and quarter of the step. Calls
// `release` when the warp needs the stage no more.
template <class Math, class Sum, int kMTiles, int kNTiles, class ReaderA, class ReaderB, class Release>
__device__ inline void multiply_step(Accumulators<Sum, kMTiles, kNTiles>& sums, const ReaderA& read_a,
                                     uint32_t tile_a, const ReaderB& read_b, uint32_t tile_b,
                                     uint32_t present, Release release) {
    if constexpr (Math::kQuarters > 1) {
        const auto multiply = [&](auto has) {
            multiply_long<Math>(sums, read_a, tile_a, read_b, tile_b, has, release);
        };
        if (present == kAllPresent<kNTiles>) return multiply([](int, int) { return true; });
        if (present != 0) return multiply([&](int, int n) { return present >> 4 * n & 1; });
    } else if (present == kAllPresent<kNTiles>) {
        multiply_all<Math>(sums, read_a, tile_a, read_b, tile_b);
    } else if (present != 0) {
#pragma unroll
        for (int quarter = 0; quarter < kQuarters; quarter += Math::kQuarters)
            if (present >> quarter & kAllPresent<kNTiles> & 0x11111111u)
                multiply_quarter<Math, false>(sums, read_a, tile_a, read_b, tile_b, quarter,
                                              present >> quarter);
    }
    release();
}

}  // namespace ts::sm80
