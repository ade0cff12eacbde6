// The one failure type of the core. Every error has a code that names who must act; `bind/` maps
// each code to a class of kqview.errors, and a test checks that the map is complete.
#pragma once

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
    no_free_slot,       // NoFreeSlot
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
        case errc::no_free_slot: return "no_free_slot";
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

// Message form: "<noun>.<verb>: <got>, <limit>; <remedy>".
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

}  // namespace kqview
