// One block of host memory, page-locked or plain, and the allocator it came from.
// Owner:   a host_buffer owns its block and shares the allocator, so it may outlive the code that
//          created the pool.
// Threads: any; one thread at a time uses a buffer, several at once an allocator.
// Never:   throws; uses ggml or CUDA (the llama layer injects an allocator for page-locked memory).
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

namespace kqview {

// Every allocator aligns blocks to this: enough for AVX-512 and for ggml.
inline constexpr std::size_t host_alignment_bytes = 64;

// Source of host memory. All members may be called from any thread and must not call the pool.
class host_allocator {
public:
    virtual ~host_allocator() = default;

    // Returns null if there is no memory. Sets `is_pinned` if the block is page-locked.
    virtual void* allocate(std::size_t n_bytes, bool& is_pinned) noexcept = 0;

    // Frees a block from allocate(), with the same `n_bytes` and `is_pinned`.
    virtual void release(void* data, std::size_t n_bytes, bool is_pinned) noexcept = 0;

    // True if blocks are normally page-locked, so that a plain one is the slow path.
    virtual bool offers_pinned() const noexcept = 0;
};

// Memory of operator new: 64-byte aligned, page aligned above 64 KiB; never page-locked.
std::shared_ptr<host_allocator> plain_allocator();

class host_buffer {
public:
    host_buffer() noexcept = default;
    ~host_buffer();
    host_buffer(host_buffer&& other) noexcept { *this = std::move(other); }
    host_buffer& operator=(host_buffer&& other) noexcept;

    // An empty buffer when the allocator has no memory.
    static host_buffer allocate(std::shared_ptr<host_allocator> allocator,
                                std::size_t n_bytes) noexcept;

    explicit operator bool() const noexcept { return data_ != nullptr; }
    std::byte* data() const noexcept { return data_; }
    std::size_t size_bytes() const noexcept { return size_bytes_; }
    bool is_pinned() const noexcept { return is_pinned_; }

private:
    std::shared_ptr<host_allocator> allocator_;
    std::byte* data_ = nullptr;
    std::size_t size_bytes_ = 0;
    bool is_pinned_ = false;
};

}  // namespace kqview
