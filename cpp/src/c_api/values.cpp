// The public functions on values.

#include "abi.h"
#include "c_api/guard.h"
#include "checks.h"
#include "descriptors.h"
#include "device.h"
#include "dispatch.h"
#include "operands.h"
#include "product.h"
#include "storage.h"

using namespace ts;

ts_status_t ts_values_prepacked_size(const ts_matmul_desc* source, size_t* bytes) {
    return guard([&] {
        const ts_matmul_desc desc = read_struct(source, "desc");
        check_pointer(bytes, "bytes");
        const Problem problem = check_problem(desc);
        *bytes = prepacked_size(problem, choose(problem, device_of(problem), wish_of(desc)));
    });
}

ts_status_t ts_values_prepack(const ts_matmul_desc* source, void* prepacked, size_t prepacked_bytes,
                              ts_stream_t stream) {
    return guard([&] { prepack_values(read_struct(source, "desc"), prepacked, prepacked_bytes, stream); });
}

ts_status_t ts_values_dequantize(const ts_matmul_desc* source, void* dense, size_t dense_bytes,
                                 ts_stream_t stream) {
    return guard([&] {
        const Problem problem = check_problem(read_struct(source, "desc"));
        require(problem.op != Op::sdd_tn, "op must be dds_nt or dds_nn, got ", TS_SDD_TN);
        require(!is_quantized(problem.input_dtype), "x.dtype must be 1 to ", kActivationDTypes, ", got ",
                abi_number(problem.input_dtype));
        check_dequantization(problem, dense, dense_bytes);
        dequantize_values(problem, dense, stream);
    });
}

ts_status_t ts_values_compress(const ts_pattern* pattern, int32_t device, int32_t dtype, const void* values,
                               const uint8_t* mask, int32_t transposed, void* compressed, uint32_t* metadata,
                               ts_stream_t stream) {
    return guard([&] {
        require(transposed == 0 || transposed == 1, "transposed must be 0 or 1, got ", transposed);
        const Compression compression{check_pattern(pattern),
                                      check_device_type(device),
                                      check_value_dtype(dtype),
                                      transposed == 1,
                                      values,
                                      mask,
                                      compressed,
                                      metadata};
        check_compression(compression);
        compress_values(compression, stream);
    });
}
