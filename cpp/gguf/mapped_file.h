// A file's bytes, mapped read-only: what is not looked at is not read, so the header of 50 GB costs
// nothing.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace kqview {

class mapped_file {
public:
    // Raises model_load, in words for the caller of Engine, where there is no regular file that can
    // be read.
    explicit mapped_file(const std::string& path);
    ~mapped_file();
    mapped_file(const mapped_file&) = delete;
    mapped_file& operator=(const mapped_file&) = delete;

    std::span<const std::byte> bytes() const { return bytes_; }

private:
    std::span<const std::byte> bytes_;
};

}  // namespace kqview
