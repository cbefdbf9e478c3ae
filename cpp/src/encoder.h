// Layers of encoders of texts: checks, and the choice of the instructions that compute them.
#pragma once

#include <cstddef>

#include "tilesparse/tilesparse.h"

namespace ts {

size_t encoder_workspace_size(const ts_encoder_desc& desc);
void run_encoder(const ts_encoder_desc& desc, void* workspace, size_t bytes);

}  // namespace ts
