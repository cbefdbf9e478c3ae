// Plans for kernels of CUDA devices, made on the host.
#ifndef TILESPARSE_PLAN_HPP_
#define TILESPARSE_PLAN_HPP_

#include <tilesparse/buffer.hpp>
#include <tilesparse/error.hpp>
#include <tilesparse/pattern.hpp>
#include <tilesparse/types.hpp>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace tilesparse {
inline namespace v0_1 {

// The plan that a kernel for a CUDA device walks. Made from a pattern once, for any number of tokens and all
// kernels whose ts_kernel_info has the same `plan`. Empty for a kernel that needs none.
template <class Memory>
class Plan {
  public:
    // Throws UnsupportedError for weights of more blocks, kept or not, than the builder has room for.
    Plan(const Pattern& pattern, std::int32_t kernel, Op op, Memory memory = Memory())
        : kernel_(kernel), plan_(build(pattern.c(), kernel, op, std::move(memory))) {
        const ts_pattern c = pattern.c();
        check(ts_plan_key(&c, kernel, static_cast<std::int32_t>(op), &key_));
    }

    std::int32_t kernel() const { return kernel_; }
    std::int64_t key() const { return key_; }
    const void* data() const { return plan_.data(); }
    std::size_t bytes() const { return plan_.size(); }

  private:
    static Buffer<std::byte, Memory> build(const ts_pattern& pattern, std::int32_t kernel, Op op,
                                           Memory memory) {
        std::size_t bytes = 0;
        check(ts_plan_size(&pattern, kernel, static_cast<std::int32_t>(op), &bytes));
        Buffer<std::byte> host(bytes);
        if (bytes > 0)
            check(ts_plan_build(&pattern, kernel, static_cast<std::int32_t>(op), host.data(), bytes));
        return Buffer<std::byte, Memory>::copy_of(host, std::move(memory));
    }

    std::int32_t kernel_;
    std::int64_t key_ = 0;
    Buffer<std::byte, Memory> plan_;
};

}  // namespace v0_1
}  // namespace tilesparse

#endif  // TILESPARSE_PLAN_HPP_
