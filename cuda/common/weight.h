// Weight formats. What kernels of a family know of how values are stored is in one struct for each storage,
// a parameter of their traits:
//   - what the registry says of the values it takes: kStorages, kDTypes
//   - the bytes of the weight in a stage of shared memory
//   - how they are loaded: the tensor map and its boxes, or chunks of 16 bytes
//   - how they are multiplied: an operand in shared memory, or what products take from registers
// Metadata or scales of a storage belong to the stage beside its values: only the format knows of them.
#pragma once

#include "common/problem.h"

namespace ts {

// Base of all formats for dense blocks in the dtype of the activations.
struct DenseStorage {
    static constexpr uint32_t kStorages = bits_of(Storage::dense);
    static constexpr uint32_t kDTypes = 0;
};

}  // namespace ts
