/* Bytes of each structure in the first version of the public header. No caller has a shorter one. */
#ifndef TILESPARSE_FIRST_SIZES_H_
#define TILESPARSE_FIRST_SIZES_H_

enum {
    TS_FIRST_PATTERN = 88,
    TS_FIRST_MATMUL_DESC = 160,
    TS_FIRST_DEVICE_INFO = 88,
    TS_FIRST_KERNEL_INFO = 104
};

#endif /* TILESPARSE_FIRST_SIZES_H_ */
