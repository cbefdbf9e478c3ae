// sdd in float64: see sm80/sdd.cuh.
#pragma once

#include "sm80/sdd.cuh"
#include "sm90/f64.cuh"

#undef TS_INSTANCE
#define TS_INSTANCE(name, kernel, math, tile_rows, tile_columns, warp_rows, warp_columns) \
    TS_SM90_ROW(name, Float64Row<sm80::Sdd<math, tile_rows, tile_columns, warp_rows, warp_columns>>)
