#include "host_buffer.h"

#include <new>
#include <utility>

namespace kqview {

namespace {

constexpr std::size_t page_bytes = 4096;
constexpr std::size_t page_aligned_above_bytes = 64 * 1024;

// operator delete needs the alignment again, so it depends on the size alone.
constexpr std::align_val_t alignment_of(std::size_t n_bytes) noexcept {
    return std::align_val_t{n_bytes > page_aligned_above_bytes ? page_bytes : host_alignment_bytes};
}

class operator_new_allocator final : public host_allocator {
public:
    void* allocate(std::size_t n_bytes, bool& is_pinned) noexcept override {
        is_pinned = false;
        return ::operator new(n_bytes, alignment_of(n_bytes), std::nothrow);
    }

    void release(void* data, std::size_t n_bytes, bool /*is_pinned*/) noexcept override {
        ::operator delete(data, alignment_of(n_bytes));
    }

    bool offers_pinned() const noexcept override { return false; }
};

}  // namespace

// Not a static object: a lease may be destroyed after static destructors have run.
std::shared_ptr<host_allocator> plain_allocator() {
    return std::make_shared<operator_new_allocator>();
}

host_buffer::~host_buffer() {
    if (data_ != nullptr) allocator_->release(data_, size_bytes_, is_pinned_);
}

host_buffer& host_buffer::operator=(host_buffer&& other) noexcept {
    std::swap(allocator_, other.allocator_);
    std::swap(data_, other.data_);
    std::swap(size_bytes_, other.size_bytes_);
    std::swap(is_pinned_, other.is_pinned_);
    return *this;
}

host_buffer host_buffer::allocate(std::shared_ptr<host_allocator> allocator,
                                  std::size_t n_bytes) noexcept {
    host_buffer buffer;
    bool is_pinned = false;
    if (void* data = allocator->allocate(n_bytes, is_pinned)) {
        buffer.allocator_ = std::move(allocator);
        buffer.data_ = static_cast<std::byte*>(data);
        buffer.size_bytes_ = n_bytes;
        buffer.is_pinned_ = is_pinned;
    }
    return buffer;
}

}  // namespace kqview
