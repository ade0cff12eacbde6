// Pool of host memory blocks in size classes, handed out as leases under a budget.
// Owner:   the pool owns every block; only its lease uses a leased block. The lease keeps the pool
//          alive, so a numpy view may outlive generation, slot and Engine.
// Threads: any thread for every member. A lease may be destroyed on any thread, with or without the
//          GIL, and at interpreter exit.
//          A thread of its own page-locks blocks while any are ordered, and keeps the pool alive.
// Never:   waits for a lease; calls the allocator or the release listener under its lock.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "base/fork_guard.h"
#include "host_buffer.h"

namespace kqview {

class block_pool;

namespace detail {

// Four classes per power of two, from 4 KiB; the last is 2^48 bytes, more than a machine has.
inline constexpr std::size_t n_classes = 4 * 36 + 1;

struct pool_block {
    host_buffer buffer;
    std::size_t i_class = 0;
    pool_block* next_idle = nullptr;  // intrusive: idle lists allocate nothing
    bool is_new = false;              // ordered, and not leased yet
};

}  // namespace detail

// One leased block; the destructor gives it back and then calls the pool's release listener.
class lease {
public:
    // Only block_pool can make one.
    class key {
        friend class block_pool;
        key() = default;
    };
    lease(key, std::shared_ptr<block_pool> pool, detail::pool_block* block,
          std::size_t n_bytes) noexcept;
    ~lease();
    lease(const lease&) = delete;
    lease& operator=(const lease&) = delete;

    std::byte* data() const noexcept { return block_->buffer.data(); }
    std::size_t size_bytes() const noexcept { return size_bytes_; }  // as requested
    // Of its block: what it takes of the budget.
    std::size_t block_bytes() const noexcept { return block_->buffer.size_bytes(); }
    bool is_pinned() const noexcept { return block_->buffer.is_pinned(); }

private:
    std::shared_ptr<block_pool> pool_;
    detail::pool_block* block_;
    std::size_t size_bytes_;
};

struct block_pool_options {
    std::size_t budget_bytes = 0;  // all blocks, leased or idle; try_take() never exceeds it
    std::size_t pinned_limit_bytes = std::size_t{1} << 30;
    std::shared_ptr<host_allocator> allocator;  // null: plain_allocator()
    // Page-locking takes milliseconds: true leaves it to a thread of the pool, see try_take().
    bool pins_ahead = false;
    bool poison = false;  // fill a returned block with block_pool::poison_byte (tests)
};

// Byte counts are capacities of blocks, not the sizes that the leases requested.
struct block_pool_stats {
    std::size_t budget_bytes = 0;
    std::size_t allocated_bytes = 0;  // leased and idle
    std::size_t leased_bytes = 0;
    std::size_t peak_leased_bytes = 0;
    std::size_t pinned_bytes = 0;  // page-locked part of allocated_bytes
    std::size_t n_leased = 0;
    std::size_t n_blocks = 0;           // leased and idle
    std::uint64_t n_allocations = 0;    // blocks obtained from the allocator
    std::uint64_t n_reused = 0;         // leases served from an idle block
    std::uint64_t plain_fallbacks = 0;  // plain blocks given where page-locked ones are the rule
    std::uint64_t copied_bytes = 0;     // see count_copied()
};

class block_pool : public std::enable_shared_from_this<block_pool> {
public:
    static constexpr std::byte poison_byte{0xA5};

    static std::shared_ptr<block_pool> create(block_pool_options options);

    // Returns null if the budget or the machine has no memory left; never waits. The block is at
    // most 20 % larger than `n_bytes` (4 KiB at least), and its content is left over from the last
    // lease. Throws errc::request for 0 bytes.
    // With `pins_ahead` and `is_coming`, a block that has to be page-locked first is ordered: null
    // too, `is_coming` is set, and the release listener runs when it is there. The next one, and
    // the next larger one in time, are ordered before they are asked for.
    std::shared_ptr<lease> try_take(std::size_t n_bytes, bool* is_coming = nullptr);
    // The size of that block.
    static std::size_t block_bytes(std::size_t n_bytes) noexcept;
    // Orders a block for a coming try_take(), if none is idle.
    void prepare(std::size_t n_bytes);

    // `listener` runs after each release, on the thread that dropped the lease, and when an ordered
    // block is there, on the one that made it; possibly on several threads at once. It must be
    // short, and must not throw, take the GIL, or set or clear the listener; it may drop leases.
    // When either call returns, no call of the previous listener is running or will follow.
    void set_release_listener(std::function<void()> listener);
    void clear_release_listener();

    // True if the address is inside a block of this pool, leased or idle. Proves that a view is
    // zero-copy.
    bool contains(const void* address) const;

    // Code that copies attention out of a block reports it here, which makes "zero-copy"
    // measurable.
    void count_copied(std::size_t n_bytes) noexcept { copied_bytes_ += n_bytes; }

    block_pool_stats stats() const;

private:
    friend class lease;

    explicit block_pool(block_pool_options options);

    using block_map = std::map<std::uintptr_t, detail::pool_block>;  // by address; nodes never move
    using idle_lists = std::array<detail::pool_block*, detail::n_classes>;
    using class_flags = std::array<bool, detail::n_classes>;

    detail::pool_block* take_block(std::size_t n_bytes, bool* is_coming);
    bool has_room(std::size_t capacity) const noexcept;
    bool may_pin(std::size_t capacity) const noexcept;
    void make_room(block_map& freed);
    bool order(std::size_t i_class, block_map& freed);
    void order_ahead(std::size_t n_bytes);
    void make_ordered() noexcept;
    void note_unpinned(std::size_t i_class, bool is_refused) noexcept;
    void call_listener(std::unique_lock<std::mutex>& lock);
    detail::pool_block* pop_idle(idle_lists& lists, std::size_t i_class) noexcept;
    void move_idle(idle_lists& lists, std::size_t n_bytes, block_map& into);
    detail::pool_block* add_block(host_buffer buffer, std::size_t i_class, bool reserved_pinned,
                                  bool is_order = false);
    void count_lease() noexcept;
    void put_back(detail::pool_block* block) noexcept;

    const fork_guard fork_;
    const std::size_t budget_bytes_;
    const std::size_t pinned_limit_bytes_;
    const bool pins_ahead_;
    const bool poison_;
    const std::shared_ptr<host_allocator> allocator_;
    const std::shared_ptr<host_allocator> plain_;
    std::atomic<std::uint64_t> copied_bytes_{0};

    mutable std::mutex mutex_;  // guards all below; listener_ runs outside it, see put_back()
    block_map blocks_;
    idle_lists idle_plain_{};
    idle_lists idle_pinned_{};
    block_pool_stats stats_;
    std::size_t leased_pinned_bytes_ = 0;

    class_flags is_ordered_{};
    class_flags has_failed_{};  // an order of this class: there is no memory
    std::size_t ordered_bytes_ = 0;
    bool is_making_ = false;   // the thread runs
    bool has_warned_ = false;  // that blocks are not page-locked

    std::function<void()> listener_;  // replaced only while n_calling_ is 0
    bool has_listener_ = false;
    std::size_t n_calling_ = 0;
    std::condition_variable calls_ended_;
};

}  // namespace kqview
