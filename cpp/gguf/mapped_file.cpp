#include "gguf/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace kqview {

namespace {

[[noreturn]] void fail(const std::string& path, const std::string& what) {
    throw error(errc::model_load,
                "Engine: " + path + ": " + what + "; give the path of a GGUF file");
}

struct descriptor {
    int number;
    ~descriptor() {
        if (number >= 0) ::close(number);
    }
};

}  // namespace

mapped_file::mapped_file(const std::string& path) {
    // Without O_NONBLOCK the opening of a pipe would wait for its writer.
    const descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
    if (file.number < 0) fail(path, std::strerror(errno));
    struct stat facts {};
    if (::fstat(file.number, &facts) != 0) fail(path, std::strerror(errno));
    if (!S_ISREG(facts.st_mode)) {
        fail(path, S_ISDIR(facts.st_mode) ? "is a directory" : "is not a regular file");
    }
    if (facts.st_size == 0) fail(path, "the file is empty");
    const auto size = static_cast<std::size_t>(facts.st_size);
    void* const start = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.number, 0);
    if (start == MAP_FAILED) fail(path, std::string("cannot be mapped: ") + std::strerror(errno));
    bytes_ = {static_cast<const std::byte*>(start), size};
}

mapped_file::~mapped_file() {
    if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

}  // namespace kqview
