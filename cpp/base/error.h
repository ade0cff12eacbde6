// The one failure type of the core. Every error has a code that names who must act; `bind/` maps
// each code to a class of kqview.errors, and a test checks that the map is complete. Also here: how
// messages are put together.
#pragma once

#include <array>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace kqview {

enum class errc {
    request,            // the caller's arguments: RequestError
    prompt_too_long,    // PromptTooLong
    invalid_token,      // InvalidToken
    unknown_slot,       // UnknownSlot
    invalid_capture,    // InvalidCapture
    invalid_sampling,   // InvalidSampling
    model_load,         // ModelLoadError
    unsupported_model,  // UnsupportedModel
    pool_exhausted,     // PoolExhausted
    queue_full,         // QueueFull
    out_of_memory,      // OutOfMemory
    state_format,       // StateFormatError
    state_mismatch,     // StateMismatch
    closed,             // ClosedError
    busy,               // BusyError
    decode,             // DecodeError
    internal,           // InternalError: a bug of kqview
};

// The codes' own names, in their order: the keys of kqview.errors.BY_CODE.
constexpr std::array errc_names{
    "request",          "prompt_too_long", "invalid_token",     "unknown_slot",   "invalid_capture",
    "invalid_sampling", "model_load",      "unsupported_model", "pool_exhausted", "queue_full",
    "out_of_memory",    "state_format",    "state_mismatch",    "closed",         "busy",
    "decode",           "internal"};
static_assert(errc_names.size() == static_cast<std::size_t>(errc::internal) + 1);

constexpr const char* name_of(errc code) { return errc_names[static_cast<std::size_t>(code)]; }

// A message of texts, characters and numbers, one after the other.
template <typename... Parts>
std::string text_of(const Parts&... parts) {
    std::string text;
    const auto add = [&text]<typename Part>(const Part& part) {
        if constexpr (std::is_arithmetic_v<Part> && !std::is_same_v<Part, char>) {
            text += std::to_string(part);
        } else {
            text += part;
        }
    };
    (add(parts), ...);
    return text;
}

// The message says what was wrong, the limit and what to do, and names the caller's own parameter:
// "n_ubatch is 0, allowed are 1..1048576".
class error : public std::runtime_error {
public:
    template <typename... Parts>
    error(errc code, const Parts&... message)
        : std::runtime_error(text_of(message...)), code_(code) {}

    errc code() const noexcept { return code_; }

private:
    errc code_;
};

// The exception being handled, as an error that can be handed to another thread: an error as it is,
// bad_alloc as `no_memory`, any other as `other` with "<noun>: " before its text. Call it inside a
// catch block. Allocates nothing where memory ran out.
inline error running_failure(const char* noun, errc other, const error& no_memory) noexcept {
    try {
        try {
            throw;
        } catch (const error& failure) {
            return failure;
        } catch (const std::bad_alloc&) {
            return no_memory;
        } catch (const std::exception& failure) {
            return error(other, noun, ": ", failure.what());
        } catch (...) {
            return error(other, noun, ": an exception of no known type");
        }
    } catch (...) {
        return no_memory;  // it ran out while the message was made
    }
}

// "3.10 GiB", "12.5 MiB" below one GiB, "0.0 MiB" for next to nothing.
inline std::string size_text(double n_bytes) {
    constexpr double mib = 1 << 20;
    constexpr double gib = 1 << 30;
    std::array<char, 48> text;
    if (n_bytes < gib) {
        std::snprintf(text.data(), text.size(), "%.1f MiB", n_bytes / mib);
    } else {
        std::snprintf(text.data(), text.size(), "%.2f GiB", n_bytes / gib);
    }
    return text.data();
}

inline std::string size_text(std::size_t n_bytes) {
    return size_text(static_cast<double>(n_bytes));
}

}  // namespace kqview
