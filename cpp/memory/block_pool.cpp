#include "block_pool.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>
#include <new>
#include <string>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "memory/host_buffer.h"

namespace kqview {

using detail::n_classes;
using detail::pool_block;

namespace {

constexpr unsigned min_block_log2 = 12;

// Capacities within one power of two, in steps of about 2^(1/4) from 4096. All are whole cache
// lines, so that the larger powers of two are whole pages. A row grows by one column per token:
// tokens close to each other share a class and reuse each other's blocks.
constexpr std::array<std::size_t, 4> steps_bytes{4096, 4864, 5760, 6848};

std::size_t class_bytes(std::size_t i_class) noexcept {
    return steps_bytes[i_class % 4] << (i_class / 4);
}

std::size_t class_of(std::size_t n_bytes) noexcept {
    if (n_bytes <= class_bytes(0)) return 0;
    // The power of two whose range contains `n_bytes`: above its first step, up to the next power's
    // first step.
    const auto power =
        static_cast<std::size_t>(std::bit_width((n_bytes - 1) >> min_block_log2)) - 1;
    std::size_t i_class = power * 4 + 1;
    while (i_class < n_classes && class_bytes(i_class) < n_bytes) ++i_class;
    return std::min(i_class, n_classes);
}

// Of `plain` if it may not be page-locked, or if the machine refuses to lock more pages.
host_buffer allocate(const std::shared_ptr<host_allocator>& allocator,
                     const std::shared_ptr<host_allocator>& plain, std::size_t n_bytes,
                     bool may_pin) noexcept {
    host_buffer buffer;
    if (may_pin || !allocator->offers_pinned()) buffer = host_buffer::allocate(allocator, n_bytes);
    if (!buffer && allocator->offers_pinned()) buffer = host_buffer::allocate(plain, n_bytes);
    return buffer;
}

}  // namespace

lease::lease(key, std::shared_ptr<block_pool> pool, pool_block* block, std::size_t n_bytes) noexcept
    : pool_(std::move(pool)), block_(block), size_bytes_(n_bytes) {}

lease::~lease() { pool_->put_back(block_); }

std::shared_ptr<block_pool> block_pool::create(block_pool_options options) {
    return std::shared_ptr<block_pool>(new block_pool(std::move(options)));
}

block_pool::block_pool(block_pool_options options)
    : budget_bytes_(options.budget_bytes),
      pinned_limit_bytes_(options.pinned_limit_bytes),
      pins_ahead_(options.pins_ahead),
      poison_(options.poison),
      allocator_(options.allocator ? std::move(options.allocator) : plain_allocator()),
      plain_(plain_allocator()) {}

std::shared_ptr<lease> block_pool::try_take(std::size_t n_bytes, bool* is_coming) {
    if (n_bytes == 0) {
        throw error(errc::request, "a lease of 0 bytes was asked for, at least 1 is needed");
    }
    if (is_coming) *is_coming = false;
    pool_block* block = take_block(n_bytes, is_coming);
    if (block == nullptr) return nullptr;
    try {
        return std::make_shared<lease>(lease::key{}, shared_from_this(), block, n_bytes);
    } catch (const std::bad_alloc&) {
        put_back(block);
        return nullptr;
    }
}

pool_block* block_pool::take_block(std::size_t n_bytes, bool* is_coming) {
    const std::size_t i_class = class_of(n_bytes);
    if (i_class == n_classes) return nullptr;
    const std::size_t capacity = class_bytes(i_class);
    bool pins = false;
    block_map freed;
    {
        const std::lock_guard lock(mutex_);
        pool_block* idle = pop_idle(idle_pinned_, i_class);
        if (idle == nullptr) idle = pop_idle(idle_plain_, i_class);
        if (idle != nullptr) {
            if (is_coming) order_ahead(n_bytes);
            return idle;
        }
        if (is_coming && is_ordered_[i_class]) {
            *is_coming = true;
            return nullptr;
        }
        if (!has_room(capacity)) {
            // What an order takes of the budget may become free.
            if (is_coming) *is_coming = ordered_bytes_ > 0;
            return nullptr;
        }
        pins = may_pin(capacity);
        if (pins && pins_ahead_ && is_coming && !std::exchange(has_failed_[i_class], false)) {
            *is_coming = order(i_class, freed);
            if (*is_coming) return nullptr;
        }
        // The room is reserved here and filled below, outside the lock: page-locking takes
        // milliseconds, and meanwhile threads that hold the GIL drop leases.
        stats_.leased_bytes += capacity;
        stats_.allocated_bytes += capacity;
        if (pins) {
            leased_pinned_bytes_ += capacity;
            stats_.pinned_bytes += capacity;
        }
        make_room(freed);
        if (allocator_->offers_pinned() && !pins) note_unpinned(i_class, false);
    }
    freed.clear();  // before the allocation, so that the sum stays within the budget
    return add_block(allocate(allocator_, plain_, capacity, pins), i_class, pins);
}

// Those below are called with the lock.

bool block_pool::has_room(std::size_t capacity) const noexcept {
    return capacity <= budget_bytes_ &&
           stats_.leased_bytes + ordered_bytes_ <= budget_bytes_ - capacity;
}

bool block_pool::may_pin(std::size_t capacity) const noexcept {
    return allocator_->offers_pinned() && capacity <= pinned_limit_bytes_ &&
           leased_pinned_bytes_ + ordered_bytes_ <= pinned_limit_bytes_ - capacity;
}

// Moves idle blocks out of the pool where more than the limits is allocated or about to be.
void block_pool::make_room(block_map& freed) {
    if (stats_.pinned_bytes > pinned_limit_bytes_) {
        move_idle(idle_pinned_, stats_.pinned_bytes - pinned_limit_bytes_, freed);
    }
    for (idle_lists* lists : {&idle_plain_, &idle_pinned_}) {
        if (stats_.allocated_bytes > budget_bytes_) {
            move_idle(*lists, stats_.allocated_bytes - budget_bytes_, freed);
        }
    }
}

std::size_t block_pool::block_bytes(std::size_t n_bytes) noexcept {
    return class_bytes(class_of(n_bytes));
}

// False: there can be no thread to make it.
bool block_pool::order(std::size_t i_class, block_map& freed) {
    if (is_ordered_[i_class]) return true;
    if (!is_making_) {
        try {
            // Not joined: it may hang in a driver. It ends with the last order.
            std::thread([self = shared_from_this()] { self->make_ordered(); }).detach();
        } catch (...) {  // no thread, or no memory for one
            return false;
        }
        is_making_ = true;
    }
    const auto capacity = class_bytes(i_class);
    is_ordered_[i_class] = true;
    ordered_bytes_ += capacity;
    stats_.allocated_bytes += capacity;
    stats_.pinned_bytes += capacity;
    make_room(freed);
    return true;
}

// Rows grow by a column with each token: one of this size, and one for some tokens later.
void block_pool::order_ahead(std::size_t n_bytes) {
    if (!pins_ahead_) return;
    for (const auto i_class : {class_of(n_bytes), class_of(n_bytes + n_bytes / 32)}) {
        if (i_class == n_classes || idle_pinned_[i_class] || idle_plain_[i_class]) continue;
        const auto capacity = class_bytes(i_class);
        const bool needs_no_room =
            has_room(capacity) && stats_.allocated_bytes + capacity <= budget_bytes_ &&
            may_pin(capacity) && stats_.pinned_bytes + capacity <= pinned_limit_bytes_;
        if (!needs_no_room) continue;
        block_map none;
        order(i_class, none);
    }
}

void block_pool::prepare(std::size_t n_bytes) {
    const auto i_class = class_of(n_bytes);
    if (!pins_ahead_ || i_class == n_classes) return;
    block_map freed;
    const std::lock_guard lock(mutex_);
    const bool is_there = idle_pinned_[i_class] || idle_plain_[i_class];
    if (is_there || !has_room(class_bytes(i_class)) || !may_pin(class_bytes(i_class))) return;
    order(i_class, freed);
}

// The pool's thread.
void block_pool::make_ordered() noexcept {
    std::unique_lock lock(mutex_);
    for (;;) {
        const auto found = std::find(is_ordered_.begin(), is_ordered_.end(), true);
        if (found == is_ordered_.end()) break;
        const auto i_class = static_cast<std::size_t>(found - is_ordered_.begin());
        const auto capacity = class_bytes(i_class);
        lock.unlock();
        auto* const block =
            add_block(allocate(allocator_, plain_, capacity, true), i_class, true, true);
        lock.lock();
        has_failed_[i_class] = block == nullptr;
        if (block && !block->buffer.is_pinned()) note_unpinned(i_class, true);
        call_listener(lock);
    }
    is_making_ = false;
}

// Tells once why copies from devices are slow from here on.
void block_pool::note_unpinned(std::size_t i_class, bool is_refused) noexcept {
    if (pinned_limit_bytes_ == 0 || std::exchange(has_warned_, true)) return;
    try {
        const auto why = is_refused
                             ? "the system locks no more pages for a block of " +
                                   size_text(class_bytes(i_class)) + "; raise its limit or lower "
                             : size_text(leased_pinned_bytes_ + ordered_bytes_) +
                                   " of pinned_bytes are in use; drop views sooner or raise ";
        log_ring::instance().write(log_level::warning,
                                   ("copies of attention from devices become slower, into memory "
                                    "that is not page-locked: " +
                                    why + "pinned_bytes (" + size_text(pinned_limit_bytes_) + ")\n")
                                       .c_str());
    } catch (...) {  // no memory for a message
    }
}

// Caller holds the lock.
pool_block* block_pool::pop_idle(idle_lists& lists, std::size_t i_class) noexcept {
    pool_block* block = lists[i_class];
    if (block == nullptr) return nullptr;
    lists[i_class] = std::exchange(block->next_idle, nullptr);
    stats_.leased_bytes += block->buffer.size_bytes();
    if (block->buffer.is_pinned()) leased_pinned_bytes_ += block->buffer.size_bytes();
    if (!std::exchange(block->is_new, false)) ++stats_.n_reused;
    count_lease();
    return block;
}

// Moves idle blocks of at least `n_bytes` in total out of the pool, large ones first (fewest
// allocator calls). The caller holds the lock here and frees them after dropping it. Allocates
// nothing.
void block_pool::move_idle(idle_lists& lists, std::size_t n_bytes, block_map& into) {
    std::size_t moved_bytes = 0;
    for (std::size_t i_class = n_classes; i_class-- > 0;) {
        while (lists[i_class] != nullptr && moved_bytes < n_bytes) {
            pool_block* block = lists[i_class];
            lists[i_class] = block->next_idle;
            moved_bytes += block->buffer.size_bytes();
            stats_.allocated_bytes -= block->buffer.size_bytes();
            if (block->buffer.is_pinned()) stats_.pinned_bytes -= block->buffer.size_bytes();
            --stats_.n_blocks;
            const auto address = reinterpret_cast<std::uintptr_t>(block->buffer.data());
            into.insert(blocks_.extract(address));
        }
    }
}

// Turns the reservation of take_block() into a leased block, that of order() into an idle one, or
// cancels it.
pool_block* block_pool::add_block(host_buffer buffer, std::size_t i_class, bool reserved_pinned,
                                  bool is_order) {
    const std::size_t capacity = class_bytes(i_class);
    const bool has_memory = static_cast<bool>(buffer);
    const bool is_pinned = buffer.is_pinned();
    block_map added;  // allocates the node outside the lock
    try {
        if (has_memory) {
            const auto address = reinterpret_cast<std::uintptr_t>(buffer.data());
            added.emplace(address, pool_block{std::move(buffer), i_class, nullptr, false});
        }
    } catch (const std::bad_alloc&) {
        added.clear();
    }

    const std::lock_guard lock(mutex_);
    if (is_order) {
        is_ordered_[i_class] = false;
        ordered_bytes_ -= capacity;
        stats_.pinned_bytes -= capacity;
    } else if (reserved_pinned) {
        leased_pinned_bytes_ -= capacity;
        stats_.pinned_bytes -= capacity;
    }
    if (added.empty()) {
        if (!is_order) stats_.leased_bytes -= capacity;
        stats_.allocated_bytes -= capacity;
        return nullptr;
    }
    ++stats_.n_blocks;
    ++stats_.n_allocations;
    if (is_pinned) {
        if (!is_order) leased_pinned_bytes_ += capacity;
        stats_.pinned_bytes += capacity;
    } else if (allocator_->offers_pinned()) {
        ++stats_.plain_fallbacks;
    }
    auto* const block = &blocks_.insert(added.extract(added.begin())).position->second;
    if (is_order) {
        pool_block*& idle = (is_pinned ? idle_pinned_ : idle_plain_)[i_class];
        block->next_idle = std::exchange(idle, block);
        block->is_new = true;
    } else {
        count_lease();
    }
    return block;
}

void block_pool::count_lease() noexcept {
    ++stats_.n_leased;
    stats_.peak_leased_bytes = std::max(stats_.peak_leased_bytes, stats_.leased_bytes);
}

void block_pool::put_back(pool_block* block) noexcept {
    // In a forked child, the lock may be held forever by a thread that does not exist there.
    if (fork_.is_forked()) return;
    const host_buffer& buffer = block->buffer;
    if (poison_) std::memset(buffer.data(), std::to_integer<int>(poison_byte), buffer.size_bytes());

    std::unique_lock lock(mutex_);
    pool_block*& idle = (buffer.is_pinned() ? idle_pinned_ : idle_plain_)[block->i_class];
    block->next_idle = std::exchange(idle, block);
    stats_.leased_bytes -= buffer.size_bytes();
    if (buffer.is_pinned()) leased_pinned_bytes_ -= buffer.size_bytes();
    --stats_.n_leased;

    call_listener(lock);
}

// The call is counted before the lock is dropped, and set_release_listener() waits for that count:
// the function is neither replaced nor destroyed during a call.
void block_pool::call_listener(std::unique_lock<std::mutex>& lock) {
    if (!has_listener_) return;
    ++n_calling_;
    lock.unlock();
    listener_();
    lock.lock();
    if (--n_calling_ == 0) calls_ended_.notify_all();
}

void block_pool::set_release_listener(std::function<void()> listener) {
    std::unique_lock lock(mutex_);
    has_listener_ = false;
    calls_ended_.wait(lock, [this] { return n_calling_ == 0; });
    listener_.swap(listener);  // the old one is destroyed with the parameter, after unlocking
    has_listener_ = static_cast<bool>(listener_);
}

void block_pool::clear_release_listener() { set_release_listener(nullptr); }

bool block_pool::contains(const void* address) const {
    const auto target = reinterpret_cast<std::uintptr_t>(address);
    const std::lock_guard lock(mutex_);
    auto above = blocks_.upper_bound(target);
    if (above == blocks_.begin()) return false;
    const auto& [start, block] = *std::prev(above);
    return target - start < block.buffer.size_bytes();
}

block_pool_stats block_pool::stats() const {
    const std::lock_guard lock(mutex_);
    block_pool_stats result = stats_;
    result.budget_bytes = budget_bytes_;
    result.copied_bytes = copied_bytes_;
    return result;
}

}  // namespace kqview
