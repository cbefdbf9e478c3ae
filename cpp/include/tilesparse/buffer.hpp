// Owners of memory of the host or a device.
#ifndef TILESPARSE_BUFFER_HPP_
#define TILESPARSE_BUFFER_HPP_

#include <tilesparse/error.hpp>
#include <tilesparse/span.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <string>
#include <type_traits>
#include <utility>

namespace tilesparse {
inline namespace v0_1 {

// A Memory is a small class that can be copied, with three functions; they throw where they fail:
//
//     void* allocate(std::size_t bytes);      // at least 1, aligned to 256 bytes
//     void deallocate(void*) noexcept;
//     void copy(void* to, const void* from, std::size_t bytes);  // either way; done when it returns
//
// HostMemory is that of the CPU; docs/cpp-api.md has that of the CUDA runtime, in ten lines.
struct HostMemory {
    static void* allocate(std::size_t bytes) { return ::operator new(bytes, std::align_val_t(256)); }
    static void deallocate(void* memory) noexcept { ::operator delete(memory, std::align_val_t(256)); }
    static void copy(void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }
};

// Owner of `size` elements of a Memory, of any content. Can be moved, not copied.
template <class T, class Memory = HostMemory>
class Buffer {
    static_assert(std::is_trivially_copyable_v<T>);

  public:
    Buffer() : memory_() {}
    explicit Buffer(std::size_t size, Memory memory = Memory()) : memory_(std::move(memory)), size_(size) {
        if (size > SIZE_MAX / sizeof(T)) throw std::bad_array_new_length();
        if (size > 0) data_ = static_cast<T*>(memory_.allocate(bytes()));
    }
    Buffer(Buffer&& other) noexcept
        : memory_(other.memory_),
          data_(std::exchange(other.data_, nullptr)),
          size_(std::exchange(other.size_, 0)) {}
    Buffer& operator=(Buffer&& other) noexcept {
        Buffer(std::move(other)).swap(*this);
        return *this;
    }
    ~Buffer() {
        if (data_ != nullptr) memory_.deallocate(data_);
    }

    // With the elements of a host container, or of another buffer of the same Memory.
    static Buffer copy_of(Span<const T> source, Memory memory = Memory()) {
        Buffer buffer(source.size(), std::move(memory));
        if (source.size() > 0) buffer.memory_.copy(buffer.data_, source.data(), buffer.bytes());
        return buffer;
    }
    void copy_to(Span<T> target) const {
        detail::require(target.size() == size_, "target must have the size of the buffer, " +
                                                    std::to_string(size_) + ", got " +
                                                    std::to_string(target.size()));
        if (size_ > 0) Memory(memory_).copy(target.data(), data_, bytes());
    }

    T* data() noexcept { return data_; }
    const T* data() const noexcept { return data_; }
    std::size_t size() const noexcept { return size_; }
    std::size_t bytes() const noexcept { return size_ * sizeof(T); }

  private:
    void swap(Buffer& other) noexcept {
        std::swap(memory_, other.memory_);
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
    }

    Memory memory_;
    T* data_ = nullptr;
    std::size_t size_ = 0;
};

}  // namespace v0_1
}  // namespace tilesparse

#endif  // TILESPARSE_BUFFER_HPP_
