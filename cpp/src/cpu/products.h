// The CPU products. Every one is a sum over kept blocks of row tiles of 16 or 32 features times panels of
// columns:
//
//   dds  columns are tokens; the activations are packed into panels once, W is read where it lies;
//        for decode, where panels would be nearly empty, vectors lie along k
//   sdd  columns are features of x; tokens are cut into slabs, which take the place of the blocks
//
// A task is what one thread computes. It owns what it writes and sums in the order of the pattern, so results
// do not depend on the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/problem.h"
#include "cpu/steps.h"
#include "threads.h"

namespace ts::cpu {

constexpr int64_t kSumBytes = kTaskFeatures * 64 * 4;  // of a task times the widest tile

// `finish`: the last step for the dtype of the result.
using Finish = void (*)(const Output&);

// Each product runs in a region of its own, or in that of the caller, whose members then all call it.
// Memory for a dds product, and for sdd the most, suffices for the same with fewer tokens, too.
size_t dds_workspace_size(const Steps& steps, const Problem& problem, const Device& device);
void dds(const Steps& steps, Finish finish, const Problem& problem, const Device& device, void* workspace,
         Member* member = nullptr);

bool suits_decode(const Steps& steps, const Problem& problem);
size_t decode_workspace_size(const Steps& steps, const Problem& problem, const Device& device);
void decode(const Steps& steps, Finish finish, const Problem& problem, const Device& device, void* workspace,
            Member* member = nullptr);

size_t sdd_workspace_size(const Steps& steps, const Problem& problem, const Device& device);
size_t most_sdd_workspace_size(const Steps& steps, const Problem& problem, const Device& device);
void sdd(const Steps& steps, Finish finish, const Problem& problem, const Device& device, void* workspace,
         Member* member = nullptr);

// Products of blocks with sides of any length, which need not divide the shape. `sums`: the steps of the
// dtype of sums.
size_t blocks_workspace_size(const Steps& steps, const Steps& sums, const Problem& problem,
                             const Device& device);
void blocks(const Steps& steps, const Steps& sums, Finish finish, const Problem& problem,
            const Device& device, void* workspace);

// A product of float8_e4m3fn with scales inside of the sums. `steps`: those of float32.
size_t scaled_workspace_size(const Steps& steps, const Problem& problem, const Device& device);
void scaled(const Steps& steps, Finish finish, const Problem& problem, const Device& device, void* workspace);

// A grouped product, in one region.
size_t groups_workspace_size(const Steps& steps, const Problem& problem, const Device& device);
void groups(const Steps& steps, Finish finish, const Problem& problem, const Device& device, void* workspace);

}  // namespace ts::cpu
