/* Elements of the four dtypes of activations as double, in C11 and C++17. */

#ifndef EXAMPLES_NUMBERS_H_
#define EXAMPLES_NUMBERS_H_

#include <math.h>
#include <stdint.h>
#include <string.h>
#include <tilesparse/tilesparse.h>

static inline double get_number(const void* array, size_t i, int32_t dtype) {
    if (dtype == TS_FLOAT64) return ((const double*)array)[i];
    if (dtype == TS_FLOAT32) return ((const float*)array)[i];
    const uint16_t bits = ((const uint16_t*)array)[i];
    if (dtype == TS_BFLOAT16) {
        const uint32_t wide = (uint32_t)bits << 16;
        float number;
        memcpy(&number, &wide, sizeof number);
        return number;
    }
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double size = exponent == 31  ? (fraction != 0 ? NAN : INFINITY)
                        : exponent == 0 ? ldexp(fraction, -24)
                                        : ldexp(1024 + fraction, exponent - 25);
    return bits >> 15 ? -size : size;
}

/* Puts a multiple of 1/8 from -1 to 1, which every dtype has, there. */
static inline void put_eighths(void* array, size_t i, int32_t dtype, int eighths) {
    const float number = (float)eighths / 8;
    if (dtype == TS_FLOAT64) {
        ((double*)array)[i] = (double)number;
    } else if (dtype == TS_FLOAT32) {
        ((float*)array)[i] = number;
    } else {
        uint32_t bits;
        memcpy(&bits, &number, sizeof bits);
        const uint32_t sign = bits >> 16 & 0x8000;
        const uint32_t half = eighths == 0 ? 0 : sign | ((bits & 0x7fffffff) - (112u << 23)) >> 13;
        ((uint16_t*)array)[i] = (uint16_t)(dtype == TS_BFLOAT16 ? bits >> 16 : half);
    }
}

/* How far a result may be from the exact sum of `count` products whose sizes add up to `sizes`: it is summed
 * in float32 (float64) and rounded once to its dtype. */
static inline double allowed_error(double exact, double sizes, int64_t count, int32_t dtype) {
    const double unit = ldexp(1, dtype == TS_FLOAT64 ? -53 : -24);
    const double rounding = ldexp(1, dtype == TS_FLOAT16 ? -11 : dtype == TS_BFLOAT16 ? -8 : -23);
    const double smallest = dtype == TS_FLOAT16 ? ldexp(1, -25) : 0;
    return (dtype == TS_FLOAT64 ? unit : rounding) * fabs(exact) + smallest +
           (double)(count + 2) * unit * sizes;
}

#endif /* EXAMPLES_NUMBERS_H_ */
