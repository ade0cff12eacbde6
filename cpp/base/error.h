// The one failure type of the core. Every error has a code that names who must act; `bind/` maps
// each code to a class of kqview.errors, and a test checks that the map is complete. Also here: how
// messages say sizes of memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>

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

// The code's own name: the key of kqview.errors.BY_CODE.
constexpr const char* name_of(errc code) {
    switch (code) {
        case errc::request: return "request";
        case errc::prompt_too_long: return "prompt_too_long";
        case errc::invalid_token: return "invalid_token";
        case errc::unknown_slot: return "unknown_slot";
        case errc::invalid_capture: return "invalid_capture";
        case errc::invalid_sampling: return "invalid_sampling";
        case errc::model_load: return "model_load";
        case errc::unsupported_model: return "unsupported_model";
        case errc::pool_exhausted: return "pool_exhausted";
        case errc::queue_full: return "queue_full";
        case errc::out_of_memory: return "out_of_memory";
        case errc::state_format: return "state_format";
        case errc::state_mismatch: return "state_mismatch";
        case errc::closed: return "closed";
        case errc::busy: return "busy";
        case errc::decode: return "decode";
        case errc::internal: return "internal";
    }
    return "internal";
}

// The message says what was wrong, the limit and what to do, and names the caller's own parameter:
// "n_ubatch is 0, allowed are 1..1048576".
class error : public std::runtime_error {
public:
    error(errc code, const std::string& message) : std::runtime_error(message), code_(code) {}

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
            return error(other, std::string(noun) + ": " + failure.what());
        } catch (...) {
            return error(other, std::string(noun) + ": an exception of no known type");
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
