// ldmatrix, by CuTe's copy atoms.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cute/arch/copy_sm75.hpp>

namespace ts {

// Loads four matrices of 8 rows of 16 bytes. Each lane names the address of one row in shared memory.
// `kTransposed`: transposes the matrices, as 8 x 8 elements of 16 bits.
template <bool kTransposed>
__device__ inline void load_matrices(uint32_t (&to)[4], uint32_t address) {
    using Atom = std::conditional_t<kTransposed, cute::SM75_U16x8_LDSM_T, cute::SM75_U32x4_LDSM_N>;
    const auto* row = static_cast<const cute::uint128_t*>(__cvta_shared_to_generic(address));
    Atom::copy(*row, to[0], to[1], to[2], to[3]);
}

}  // namespace ts
