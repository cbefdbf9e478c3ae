// Grouped wgrad (sm_90): sdd.cuh for groups of tokens, each of which has a weight of its own.
//   W_g[n,k] (+)= sum over the tokens t of group g of Y[t,n] * X[t,k], for the kept blocks only.
// A tile has blocks of one weight and sums up the tokens of its group: the last step of a group reads zeros
// in place of the tokens of the next, in both operands (map_group). Tiles are not split over the tokens. CTAs
// take one after another, those of the groups with most tokens first (elementwise/groups.h). Y and X are
// row-major.
#pragma once

#include "sm90/sdd_grouped_launch.cuh"

#define TS_INSTANCE(name, kernel, math) TS_SM90_ROW(name, GroupedSdd<math>)
