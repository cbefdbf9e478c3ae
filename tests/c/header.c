/* The public header stands on its own in C11, and may be included twice. */
#include <tilesparse/tilesparse.h>

_Static_assert(sizeof(ts_status_t) == 4, "a status is an int32_t");
_Static_assert(offsetof(ts_pattern, struct_size) == 0, "struct_size is the first field");
_Static_assert(offsetof(ts_matmul_desc, struct_size) == 0, "struct_size is the first field");
_Static_assert(offsetof(ts_device_info, struct_size) == 0, "struct_size is the first field");
_Static_assert(offsetof(ts_kernel_info, struct_size) == 0, "struct_size is the first field");
/* Sizes are part of the ABI: those of structures with struct_size only grow, the others stay. */
_Static_assert(sizeof(ts_pattern) == 88, "ts_pattern has changed");
_Static_assert(sizeof(ts_matrix) == 24, "ts_matrix has changed");
_Static_assert(sizeof(ts_operand) == 56, "ts_operand has changed");
_Static_assert(sizeof(ts_prepared) == 24, "ts_prepared has changed");
_Static_assert(sizeof(ts_matmul_desc) == 512, "ts_matmul_desc has changed");
_Static_assert(sizeof(ts_device_info) == 88, "ts_device_info has changed");
_Static_assert(sizeof(ts_kernel_info) == 116, "ts_kernel_info has changed");
