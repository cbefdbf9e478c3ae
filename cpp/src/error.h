// Errors inside the library: thrown as one type, turned into a status and a sentence by c_api/guard.h.
#pragma once

#include <exception>
#include <sstream>
#include <string>
#include <utility>

#include "tilesparse/tilesparse.h"

namespace ts {

class Error : public std::exception {
  public:
    Error(ts_status_t status, std::string message) : status_(status), message_(std::move(message)) {}

    ts_status_t status() const { return status_; }
    const char* what() const noexcept override { return message_.c_str(); }

  private:
    ts_status_t status_;
    std::string message_;
};

template <class... Words>
[[noreturn]] void fail(ts_status_t status, const Words&... words) {
    std::ostringstream text;
    (text << ... << words);
    throw Error(status, text.str());
}

template <class... Words>
void require(bool holds, const Words&... words) {
    if (!holds) fail(TS_INVALID_ARGUMENT, words...);
}

}  // namespace ts
