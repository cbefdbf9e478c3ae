#include "stored.h"

#include <string.h>

void init_stored(stored* s, int32_t dtype) {
    memset(s, 0xa5, sizeof *s);
    s->dtype = dtype;
    for (int i = 0; i < COUNT; ++i) {
        const float number = (float)(i % 15 + 1) / 8;
        if (dtype == TS_FLOAT32)
            memcpy(s->values + i * sizeof number, &number, sizeof number);
        else if (dtype == TS_INT8 || dtype == TS_INT4)
            s->values[i] = (uint8_t)(i * 37);
        else
            s->values[i] = (uint8_t)(i % 2 << 7 | (6 + i % 3) << 3 | i / 2 % 8);
        s->mask[i] = (uint8_t)(i / 4 * 7 >> i % 4 & 1 ? 1 + i % 255 : 0);
    }
    for (int i = 0; i < NNZ * BN; ++i) s->scales[i] = i % 3 == 0 ? 0.25f : i % 3 == 1 ? 1 : -2;
}

double number_at(const unsigned char* values, int32_t dtype, int i) {
    float number;
    if (dtype == TS_INT8) return (int8_t)values[i];
    if (dtype == TS_INT4) {
        const int bits = i % 2 == 0 ? values[i / 2] & 15 : values[i / 2] >> 4;
        return bits < 8 ? bits : bits - 16;
    }
    if (dtype == TS_FLOAT32) {
        memcpy(&number, values + i * sizeof number, sizeof number);
        return number;
    }
    const double fraction = (8 + values[i] % 8) / 1024.0 * (1 << (values[i] >> 3 & 15));
    return values[i] & 0x80 ? -fraction : fraction;
}

int is_kept(const stored* s, int i) {
    int before = 0;
    for (int j = i / 4 * 4; j < i; ++j) before += s->mask[j] != 0;
    return s->mask[i] != 0 && before < 2;
}

int kept_column(const uint32_t* metadata, int row, int index) {
    const int group = index / 2 * 4, r = row % BN;
    const int block = row / BN * (BK / 32) + group / 32;
    const uint32_t word = metadata[((block * (BN / 16) + r / 16) * 8 + r % 8) * 2 + group % 32 / 16];
    const uint32_t half = r % 16 < 8 ? word & 0xffff : word >> 16;
    return group + (int)(half >> (group % 16 + index % 2 * 2) & 3);
}

ts_status_t compress(stored* s, const ts_pattern* pattern) {
    return ts_values_compress(pattern, TS_CPU, s->dtype, s->values, s->mask, 0, s->compressed, s->metadata,
                              NULL);
}
