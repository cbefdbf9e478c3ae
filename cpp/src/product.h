// One product: its memory, its last checks and its launch.
#pragma once

#include <cstddef>

#include "common/problem.h"
#include "device.h"
#include "dispatch.h"
#include "tilesparse/tilesparse.h"

namespace ts {

const NamedDevice& device_of(const Problem& problem);

// The wish refers to the descriptor.
Wish wish_of(const ts_matmul_desc& desc);

size_t prepacked_size(const Problem& problem, const Choice& choice);

// The kernel and the sums beside it share the workspace: one ends before the other begins.
size_t workspace_size(const Problem& problem, const Device& device, const Choice& choice);

// Checks what a kernel of the CPU reads of a product beside its operands.
void check_read(const ts_matmul_desc& desc, const Problem& problem, const Choice& choice);

// Checks the caller's memory, of which `needed` bytes are used. `of`: what uses them.
void check_workspace(const void* workspace, size_t bytes, size_t needed, DeviceType device, const char* of);

void matmul(const ts_matmul_desc& desc, void* workspace, size_t bytes, void* stream);

void prepack_values(const ts_matmul_desc& desc, void* prepacked, size_t bytes, void* stream);

}  // namespace ts
