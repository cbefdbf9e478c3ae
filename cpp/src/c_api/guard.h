// The guard around every public function: exceptions become a status and this thread's last error.
#pragma once

#include <exception>
#include <new>
#include <stdexcept>

#include "error.h"
#include "tilesparse/tilesparse.h"

namespace ts {

// Keeps the sentence, even where memory has run out.
ts_status_t report(ts_status_t status, const char* sentence) noexcept;

template <class Body>
ts_status_t guard(Body body) noexcept {
    try {
        body();
        return TS_SUCCESS;
    } catch (const Error& error) {
        return report(error.status(), error.what());
    } catch (const std::bad_alloc&) {
        return report(TS_OUT_OF_MEMORY, "out of host memory");
    } catch (const std::length_error&) {  // of a container: more than there can be memory for
        return report(TS_OUT_OF_MEMORY, "out of host memory");
    } catch (const std::exception& error) {
        return report(TS_INTERNAL_ERROR, error.what());
    } catch (...) {
        return report(TS_INTERNAL_ERROR, "an exception without a text");
    }
}

}  // namespace ts
