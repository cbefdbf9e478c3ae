// Values from one storage to another, on whichever device they are.
#pragma once

#include "common/problem.h"
#include "operands.h"

namespace ts {

// Checked values as a plain storage has them, in the dtype of the activations.
void expand_values(const Problem& problem, void* plain, void* stream);

void compress_values(const Compression& compression, void* stream);

}  // namespace ts
