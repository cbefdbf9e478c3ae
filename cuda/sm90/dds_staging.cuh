// Layout of a warpgroup's sums in the buffers through which results are stored, and a residual or gate
// is read. A buffer has 64 features and Traits::kChunkTokens tokens, which are 128 bytes, in boxes of TMA:
// row-major [warpgroup_rows][tokens][row_width], for float32 in boxes of 32 features, or 16, else [64
// features][tokens];
// their lines are swizzled over their width.
//
//     put(sums, buffer): the results, rounded
//     combine(sums, buffer, join): makes join(sum, what is in a buffer) of the sums
//     activate(buffer, activation): what is in a buffer, where it lies; a warp does so for its own features
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>

#include "common/epilogue.cuh"
#include "sm90/dds_arguments.cuh"

namespace ts::sm90 {

constexpr int kLine = 128;  // bytes

__device__ inline uint32_t swizzled(uint32_t offset, uint32_t line) {
    return offset ^ (offset / kLine & line / 16 - 1) * 16;
}

// Results of 16 bits, in matrices of 8 x 8.
template <class Result>
class HalfStaging {
    static constexpr int kTokens = 64;

  public:
    __device__ HalfStaging(const DdsArguments& arguments, int thread)
        : row_width_(arguments.row_width), place_(place(arguments, thread)) {}

    template <bool kRowMajor>
    __device__ void put(const float* sums, char* buffer) const {
#pragma unroll
        for (int i = 0; i < kTokens / 16; ++i) {
            uint32_t words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                words[j] = rounded<Result>(sums[8 * i + 2 * j], sums[8 * i + 2 * j + 1]);
            using Copy = std::conditional_t<kRowMajor, cute::SM90_U16x8_STSM_T, cute::SM90_U32x4_STSM_N>;
            Copy::copy(words[0], words[1], words[2], words[3], line_of<kRowMajor>(buffer, i));
        }
    }

    template <bool kRowMajor, class Join>
    __device__ void combine(float* sums, char* buffer, Join join) const {
#pragma unroll
        for (int i = 0; i < kTokens / 16; ++i) {
            uint32_t words[4];
            using Copy = std::conditional_t<kRowMajor, cute::SM75_U16x8_LDSM_T, cute::SM75_U32x4_LDSM_N>;
            Copy::copy(line_of<kRowMajor>(buffer, i), words[0], words[1], words[2], words[3]);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const auto& pair = reinterpret_cast<const Pair<Result>&>(words[j]);
                const float first = to_float(pair.first), second = to_float(pair.second);
                float* const to = sums + 8 * i + 2 * j;
                to[0] = join(to[0], first);
                to[1] = join(to[1], second);
            }
        }
    }

    template <bool kRowMajor>
    __device__ void activate(char* buffer, Activation activation) const {
#pragma unroll 1
        for (int i = 0; i < kTokens / 16; i += 2)
            activate_elements(reinterpret_cast<Result*>(&line_of<kRowMajor>(buffer, i)),
                              reinterpret_cast<Result*>(&line_of<kRowMajor>(buffer, i + 1)), activation);
    }

  private:
    // Address of this lane's line of the first four matrices.
    __device__ static uint32_t place(const DdsArguments& arguments, int thread) {
        const int warp = thread / 32, lane = thread % 32, matrix = lane / 8;
        const int feature = 16 * warp + matrix % 2 * 8, token = matrix / 2 * 8;
        if (arguments.output_layout == Layout::column_major)
            return swizzled((feature + lane % 8) * kLine + token * 2, kLine);
        const int width = arguments.row_width;
        return swizzled((feature / width * kTokens + token + lane % 8) * 2 * width + feature % width * 2,
                        2 * width);
    }

    // Address of the lane's line of the i-th four matrices. 16 tokens on, neither swizzle changes.
    template <bool kRowMajor>
    __device__ cute::uint128_t& line_of(char* buffer, int i) const {
        const uint32_t offset = kRowMajor ? place_ + 32 * i * row_width_ : place_ ^ 32 * i;
        return *reinterpret_cast<cute::uint128_t*>(buffer + offset);
    }

    int row_width_;
    uint32_t place_;
};

// Features of float32 that lie side by side in a box, of blocks with so many features.
__host__ __device__ constexpr int float_width(int row_width) { return row_width < 32 ? row_width : 32; }

// Results of 32 bits, word by word: as the sums of a thread are, without conflicts of banks in row-major
// boxes of 32 features.
class FloatStaging {
    static constexpr int kTokens = 32;

  public:
    __device__ FloatStaging(const DdsArguments& arguments, int thread)
        : thread_(thread), line_(4 * float_width(arguments.row_width)), place_(place(arguments, thread)) {}

    template <bool kRowMajor>
    __device__ void put(const float* sums, char* buffer) const {
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) word_of<kRowMajor>(buffer, i) = sums[i];
    }

    template <bool kRowMajor, class Join>
    __device__ void combine(float* sums, char* buffer, Join join) const {
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) sums[i] = join(sums[i], word_of<kRowMajor>(buffer, i));
    }

    // The 16 features of a warp are lines, or of each token's line in a box all, or half of it.
    template <bool kRowMajor>
    __device__ void activate(char* buffer, Activation activation) const {
#pragma unroll 1
        for (int i = 0; i < 4; i += 2)
            activate_elements(part_of<kRowMajor>(buffer, i), part_of<kRowMajor>(buffer, i + 1), activation);
    }

  private:
    // The i-th four elements of the 16 that a lane activates.
    template <bool kRowMajor>
    __device__ float* part_of(char* buffer, int i) const {
        const int warp = thread_ / 32, lane = thread_ % 32;
        const uint32_t offset = kRowMajor ? row_major(16 * warp + 4 * i, lane, line_)
                                          : (16 * warp + 4 * i + lane / 8) * kLine + lane % 8 * 16;
        return reinterpret_cast<float*>(buffer + offset);
    }

    // Address of the thread's first sum.
    __device__ static uint32_t place(const DdsArguments& arguments, int thread) {
        const int warp = thread / 32, lane = thread % 32;
        const int feature = 16 * warp + lane / 4, token = lane % 4 * 2;
        if (arguments.output_layout == Layout::column_major)
            return swizzled(feature * kLine + token * 4, kLine);
        return row_major(feature, token, 4 * float_width(arguments.row_width));
    }
    __device__ static uint32_t row_major(uint32_t feature, uint32_t token, uint32_t line) {
        const uint32_t width = line / 4;
        return swizzled((feature / width * kTokens + token) * line + feature % width * 4, line);
    }

    // A thread has two neighbours of eight tokens, of a feature and of the one 8 on.
    template <bool kRowMajor>
    __device__ float& word_of(char* buffer, int i) const {
        const int eight = i / 4, feature = i / 2 % 2, token = i % 2;
        const uint32_t next_token = line_ == kLine ? kLine + 16 : line_;  // where swizzles differ
        const uint32_t offset = kRowMajor ? (place_ ^ feature * 32 ^ token * next_token) + eight * 8 * line_
                                          : (place_ ^ eight * 32) + feature * 8 * kLine + token * 4;
        return *reinterpret_cast<float*>(buffer + offset);
    }

    int thread_;
    uint32_t line_;  // bytes of a token in a box
    uint32_t place_;
};

}  // namespace ts::sm90
