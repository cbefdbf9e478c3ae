// Views of memory that others own.
#ifndef TILESPARSE_SPAN_HPP_
#define TILESPARSE_SPAN_HPP_

#include <tilesparse/types.hpp>

#include <cstddef>
#include <iterator>
#include <type_traits>
#include <utility>

namespace tilesparse {
inline namespace v0_1 {

namespace detail {
// Containers with data() and size() that outlive the call: an lvalue, or a span, which has an element_type
// where owners have none.
template <class C, class = void>
struct IsSpan : std::false_type {};
template <class C>
struct IsSpan<C, std::void_t<typename std::remove_reference_t<C>::element_type>> : std::true_type {};
template <class C>
using ElementOf = std::remove_pointer_t<decltype(std::data(std::declval<C&>()))>;
template <class C>
using EnableIfLasting = std::enable_if_t<std::is_lvalue_reference_v<C> || IsSpan<C>::value>;
}  // namespace detail

// Elements that lie next to each other. Made of vectors, arrays, spans and Buffers, but not of temporary
// ones.
template <class T>
class Span {
  public:
    using element_type = T;

    constexpr Span() = default;
    constexpr Span(T* data, std::size_t size) : data_(data), size_(size) {}
    template <class C, class = detail::EnableIfLasting<C>,
              class = std::enable_if_t<std::is_convertible_v<detail::ElementOf<C> (*)[], T (*)[]>>>
    constexpr Span(C&& container) : Span(std::data(container), std::size(container)) {}

    constexpr T* data() const noexcept { return data_; }
    constexpr std::size_t size() const noexcept { return size_; }
    constexpr T* begin() const noexcept { return data_; }
    constexpr T* end() const noexcept { return data_ + size_; }
    constexpr T& operator[](std::size_t i) const { return data_[i]; }

  private:
    T* data_ = nullptr;
    std::size_t size_ = 0;
};

// A span whose dtype is known while the program runs, and whether it may be written.
class Array {
  public:
    template <class C, class = detail::EnableIfLasting<C>,
              class = std::enable_if_t<!std::is_same_v<std::decay_t<C>, Array>>,
              class T = detail::ElementOf<C>>
    Array(C&& container) : Array(std::data(container), std::size(container)) {}
    template <class T, class = std::enable_if_t<!std::is_void_v<T>>>
    Array(T* data, std::size_t size) : Array(data, size, DtypeOf<std::remove_const_t<T>>::value) {}
    Array(void* data, std::size_t size, Dtype dtype) : data_(data), size_(size), dtype_(dtype) {}
    Array(const void* data, std::size_t size, Dtype dtype)
        : data_(const_cast<void*>(data)), size_(size), dtype_(dtype), is_const_(true) {}

    void* data() const noexcept { return data_; }
    std::size_t size() const noexcept { return size_; }  // elements
    Dtype dtype() const noexcept { return dtype_; }
    bool is_const() const noexcept { return is_const_; }

  private:
    void* data_;
    std::size_t size_;
    Dtype dtype_;
    bool is_const_ = false;
};

}  // namespace v0_1
}  // namespace tilesparse

#endif  // TILESPARSE_SPAN_HPP_
