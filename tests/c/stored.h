/* Values of the layer in fewer bytes. */
#ifndef TILESPARSE_TESTS_STORED_H_
#define TILESPARSE_TESTS_STORED_H_

#include "layer.h"

enum { COUNT = NNZ * BN * BK }; /* of the values of all blocks */

typedef struct stored {
    int32_t dtype;
    _Alignas(16) unsigned char values[COUNT * sizeof(float)];
    _Alignas(16) unsigned char compressed[COUNT / 2 * sizeof(float) + 4];
    _Alignas(16) uint32_t metadata[COUNT / 32 + 1];
    _Alignas(16) uint8_t mask[COUNT];
    _Alignas(16) float scales[NNZ * BN];
} stored;

/* Masks of every kind, from none of four to all; scales that leave sums exact. */
void init_stored(stored* s, int32_t dtype);
/* A number of that dtype; there are no subnormal ones of 8 bits and no NaN. */
double number_at(const unsigned char* values, int32_t dtype, int i);
/* True for the first two of four neighbours that are in the mask. */
int is_kept(const stored* s, int i);
/* The column of a kept value of a row, of all rows of all blocks, as the header says. */
int kept_column(const uint32_t* metadata, int row, int index);
ts_status_t compress(stored* s, const ts_pattern* pattern);

#endif /* TILESPARSE_TESTS_STORED_H_ */
