// The gradient of a bias on either device, for products whose kernel does not sum y.
#pragma once

#include "common/problem.h"
#include "elementwise/group_sums.h"
#include "elementwise/sums.h"

namespace ts {

// Bytes of scratch memory, for the sums over tokens of y.
size_t sums_workspace_size(const Problem& problem, const Device& device);

void sum_y(const Problem& problem, const Device& device, void* workspace, void* stream);

using sums::ActivationGradient;

// On the current CUDA device.
size_t activation_gradient_workspace_size(const ActivationGradient& gradient, const Device& device);
void activation_gradient(const ActivationGradient& gradient, const Device& device, void* workspace,
                         void* stream);

using group_sums::GroupSums;

void sum_groups(const GroupSums& of, void* stream);

}  // namespace ts
