// The sums over tokens of a tokens x features matrix, the gradient of a bias. Warps sum some tokens of some
// features each, wherever they run: in a kernel of their own (elementwise/sums.cu), or beside a product that
// leaves memory idle. A second kernel adds what they leave in a fixed order.
#pragma once

#include "common/epilogue.cuh"
#include "elementwise/sums.h"

namespace ts::sums {

// Type of sums of 16-bit and float32 elements, and of float64.
template <class Element>
using SumOf = std::conditional_t<sizeof(Element) == 8, double, float>;

// Sums of the features that 32 lanes read side by side, or of one feature where its tokens lie side by side.
// Lines of 512 bytes are read either way, kAhead at a time.
//
// `kPrefetches`: asks for lines long before they are read, where few warps have to keep memory busy.
template <class Element, int kAhead, bool kPrefetches>
class Piece {
    using Sum = SumOf<Element>;
    static constexpr int kWidth = 16 / sizeof(Element);  // elements of a lane in a line
    static constexpr int kLineBytes = 512, kFetched = 32;

  public:
    static constexpr int kLine = 32 * kWidth;  // elements

    __device__ __forceinline__ Piece(const Sums& sums, int piece, int lane)
        : all_(sums), piece_(piece), lane_(lane) {}

    // Adds tokens of row-major y.
    __device__ __forceinline__ void add_tokens(int64_t first, int64_t last) {
        const auto* const y = static_cast<const Element*>(all_.y);
        const int64_t rest = (all_.features - int64_t{piece_} * kLine) * sizeof(Element);
        add_lines(y + first * all_.ld + int64_t{piece_} * kLine, all_.ld, last - first,
                  static_cast<int>(min(rest, int64_t{kLineBytes})));
    }

    // `to`: for the features of the lanes of this piece, of which so many exist.
    __device__ __forceinline__ void store(Sum* to, int64_t features) const {
        if (lane_ * kWidth >= features) return;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) to[lane_ * kWidth + i] = sums_[i];
    }

    // Sum of some tokens of column-major y, which lane 0 has.
    __device__ __forceinline__ Sum sum_of_feature(int64_t first, int64_t last) {
        const Element* const line = static_cast<const Element*>(all_.y) + piece_ * all_.ld;
        const int64_t count = max(last - first, int64_t{0}) / kLine;
        add_lines(line + first, kLine, count, kLineBytes);
        Sum sum = 0;
        for (int64_t t = first + count * kLine + lane_; t < last; t += 32) sum += element(line[t]);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sum += sums_[i];
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
        return sum;
    }

  private:
    __device__ static Sum element(Element value) { return static_cast<Sum>(value); }

    // `ld`: elements from one line to the next. `bytes`: of a line that there are.
    __device__ __forceinline__ void add_lines(const Element* first, int64_t ld, int64_t count, int bytes) {
        const auto* line = reinterpret_cast<const char*>(first);
        ld *= sizeof(Element);
        const bool reads = lane_ * 16 < bytes;
        if constexpr (kPrefetches) fetch(line, ld, count, bytes);
        for (int64_t done = 0; done < count; done += kFetched) {
            if constexpr (kPrefetches) fetch(line + kFetched * ld, ld, count - done - kFetched, bytes);
            const int lines = static_cast<int>(min(count - done, int64_t{kFetched}));
            if (reads) add_some(line + lane_ * 16, ld, lines);
            line += kFetched * ld;
        }
    }

    __device__ __forceinline__ void add_some(const char* from, int64_t ld, int lines) {
        int i = 0;
#pragma unroll 1
        for (; i + kAhead <= lines; i += kAhead, from += kAhead * ld) {
            uint4 vectors[kAhead];
#pragma unroll
            for (int j = 0; j < kAhead; ++j)
                vectors[j] = __ldg(reinterpret_cast<const uint4*>(from + j * ld));
#pragma unroll
            for (int j = 0; j < kAhead; ++j) add(vectors[j]);
        }
#pragma unroll 1
        for (; i < lines; ++i, from += ld) add(__ldg(reinterpret_cast<const uint4*>(from)));
    }

    __device__ __forceinline__ void add(const uint4& vector) {
        const auto* const elements = reinterpret_cast<const Element*>(&vector);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sums_[i] += element(elements[i]);
    }

    // Has L2 ask for the lines from one on, 128 bytes a lane. Bulk prefetches of whole lines were slower.
    __device__ __forceinline__ void fetch(const char* line, int64_t ld, int64_t count, int bytes) const {
        const int column = lane_ % 4 * 128;
        if (column >= bytes) return;
#pragma unroll 1
        for (int i = lane_ / 4; i < min(count, int64_t{kFetched}); i += 8)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(line + i * ld + column));
    }

    const Sums& all_;
    int piece_, lane_;
    Sum sums_[kWidth] = {};
};

// Work of one of that many warps: items of a piece of the features and a part of the tokens.
template <class Element, int kAhead, bool kPrefetches>
__device__ __forceinline__ void sum_items(const Sums& sums, int warp, int warps, int lane) {
    using Piece = sums::Piece<Element, kAhead, kPrefetches>;
    for (int index = warp; index < sums.pieces * sums.parts; index += warps) {
        const int piece_index = index % sums.pieces;
        const int64_t part = index / sums.pieces, first = part * sums.span;
        const int64_t last = min(first + sums.span, sums.tokens);
        Piece piece(sums, piece_index, lane);
        auto* const to = static_cast<SumOf<Element>*>(sums.partial) + part * sums.features;
        if (sums.row_major) {
            const int64_t feature = int64_t{piece_index} * Piece::kLine;
            piece.add_tokens(first, last);
            piece.store(to + feature, sums.features - feature);
        } else {
            const SumOf<Element> sum = piece.sum_of_feature(first, last);
            if (lane == 0) to[piece_index] = sum;
        }
    }
}

}  // namespace ts::sums
