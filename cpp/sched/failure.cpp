#include "sched/failure.h"

#include <new>
#include <string>

namespace kqview {

error running_failure(const char* noun, errc other, const error& no_memory) noexcept {
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
