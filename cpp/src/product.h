// One product: its memory, its last checks and its launch.
#pragma once

#include <cstddef>

#include "common/problem.h"
#include "device.h"
#include "dispatch.h"
#include "tilesparse/tilesparse.h"

namespace ts {

const NamedDevice& device_of(const Problem& problem);

// It refers to the descriptor.
Wish wish_of(const ts_matmul_desc& desc);

size_t packed_size(const Problem& problem, const Choice& choice);

// The kernel is done with its memory before what is summed apart begins.
size_t workspace_size(const Problem& problem, const Device& device, const Choice& choice);

void matmul(const ts_matmul_desc& desc, void* workspace, size_t bytes, void* stream);

void pack_values(const ts_matmul_desc& desc, void* packed, size_t bytes, void* stream);

}  // namespace ts
