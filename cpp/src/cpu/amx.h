// Multiplication by AMX: registers of 16 rows of 64 bytes, multiplied as [16, 32] x [32, 16] in bfloat16 and
// as [16, 64] x [64, 16] in int8.
#pragma once

#include "cpu/steps.h"

namespace ts::cpu {

// Linux lets a process use the tile registers once it has asked for them. False where there are none.
bool request_amx_bf16();
bool request_amx_int8();

void multiply_amx_bf16(const RowTile& s);
void multiply_amx_int8(const RowTile& s);
void multiply_tokens_amx(const TokenTile& s);

}  // namespace ts::cpu
