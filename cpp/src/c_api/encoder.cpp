// The public functions on encoders.

#include "encoder.h"

#include "abi.h"
#include "c_api/guard.h"

using namespace ts;

ts_status_t ts_encoder_workspace_size(const ts_encoder_desc* desc, size_t* bytes) {
    return guard([&] {
        check_pointer(bytes, "bytes");
        *bytes = encoder_workspace_size(read_struct(desc, "desc"));
    });
}

ts_status_t ts_encoder(const ts_encoder_desc* desc, void* workspace, size_t workspace_bytes, ts_stream_t) {
    return guard([&] { run_encoder(read_struct(desc, "desc"), workspace, workspace_bytes); });
}
