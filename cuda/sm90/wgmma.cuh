// Products of a warpgroup by wgmma: 64 x 256, 64 x 128 or 64 x 64 sums.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include <cute/arch/util.hpp>

#include "sm90/elements.cuh"

namespace ts::sm90 {

constexpr int kSums = 128;  // of a thread, of 64 x 256

// The matrix descriptor of an operand but for its address, which is added to `low`. All addresses and
// distances are counted in 16 bytes.
struct Operand {
    uint32_t low;
    uint32_t high;
    uint32_t step[4];  // from the operand's beginning to each 32 bytes of k

    __device__ uint64_t at(uint32_t address, int index) const {
        return uint64_t{high} << 32 | (low + address + step[index]);
    }
};

// An address in shared memory as operands take it: the bits above name the CTA of a cluster.
__device__ inline uint32_t operand_address(uint32_t address) { return address / 16 & 0x3fff; }
__device__ inline uint32_t operand_address(const char* address) {
    return operand_address(cute::cast_smem_ptr_to_uint(address));
}

// Lines of `width` bytes (128, 64, 32, or 16 of 8-bit elements), swizzled over that width, but for 16.
// `outer` is the distance in bytes from one line-wide column to the next.
inline Operand operand(int width, int outer) {
    const uint32_t layout = width == 128 ? 1 : width == 64 ? 2 : width == 32 ? 3 : 0;
    const uint32_t eight_lines = 8 * width / 16;
    return {static_cast<uint32_t>(outer / 16) << 16, eight_lines | layout << 30, {}};
}

// Likewise with k along the lines. Only of lines of 16 bytes an instruction reads two columns.
inline Operand line_operand(int width, int outer) { return operand(width, width == 16 ? outer : 0); }

// A thread's registers of an operand for one instruction: four words.
using WeightFragment = uint32_t[4];

template <class Atom, class Sum, class A, int kCount, size_t... kIndex, class... Metadata>
__device__ inline void start_wgmma(Sum (&sums)[kCount], const A& a, uint64_t b, bool add,
                                   std::index_sequence<kIndex...>, Metadata... metadata) {
    const auto scale = add ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero;
    if constexpr (std::is_same_v<A, WeightFragment>)
        Atom::fma(a[0], a[1], a[2], a[3], b, as_register(sums[kIndex])..., scale);
    else
        Atom::fma(a, b, as_register(sums[kIndex])..., metadata..., scale);
}

// Starts sums (+)= a b, one instruction. `a`: the descriptor of an operand in shared memory, with the
// thread's metadata if it is 2:4, or what the thread holds of the operand in registers.
template <class Atom, class Sum, class A, int kCount, class... Metadata>
__device__ inline void wgmma(Sum (&sums)[kCount], const A& a, uint64_t b, bool add, Metadata... metadata) {
    start_wgmma<Atom>(sums, a, b, add, std::make_index_sequence<kCount>(), metadata...);
}

// sums (+)= a b for 128 bytes of k.
template <class Atom, class Sum, int kCount>
__device__ inline void multiply_step(Sum (&sums)[kCount], const Operand& a, uint32_t a_address,
                                     const Operand& b, uint32_t b_address, bool add) {
    cute::warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < 4; ++i) wgmma<Atom>(sums, a.at(a_address, i), b.at(b_address, i), add || i > 0);
    cute::warpgroup_commit_batch();
}

}  // namespace ts::sm90
