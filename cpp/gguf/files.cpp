#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <unordered_set>
#include <vector>

#include "base/error.h"
#include "base/system.h"
#include "gguf/checks.h"
#include "gguf/header.h"

namespace kqview {

namespace {

template <typename... Parts>
[[noreturn]] void fail(const std::string& path, const Parts&... what) {
    throw error(errc::model_load, path, ": ", what..., "; give the path of a GGUF file");
}

// A file's bytes, mapped: reading the header of a 50 GB file is cheap.
class mapped_file {
public:
    explicit mapped_file(const std::string& path) try : bytes_(map_file(path)) {
    } catch (const std::runtime_error& reason) {
        fail(path, reason.what());
    }
    ~mapped_file() { unmap_file(bytes_); }
    mapped_file(const mapped_file&) = delete;
    mapped_file& operator=(const mapped_file&) = delete;

    std::span<const std::byte> bytes() const { return bytes_; }

private:
    const std::span<const std::byte> bytes_;
};

// A header and the bytes that it points into.
struct open_file {
    mapped_file file;
    gguf_header header;

    explicit open_file(const std::string& path)
        : file(path), header(read_gguf(file.bytes(), path)) {}
};

constexpr const char* again = "; download all parts again";

// The ending "-00001-of-00003.gguf", numbered as in llama.cpp.
std::string part_ending(std::int64_t i, std::int64_t n) {
    char text[64];
    std::snprintf(text, sizeof(text), "-%05lld-of-%05lld.gguf", static_cast<long long>(i + 1),
                  static_cast<long long>(n));
    return text;
}

std::int64_t u16_of(const gguf_header& header, const char* key, std::int64_t otherwise) {
    const auto* const value = header.find(key, gguf_type::u16);
    return value ? value->integer() : otherwise;
}

std::vector<std::unique_ptr<open_file>> open_parts(const std::string& path) {
    std::vector<std::unique_ptr<open_file>> parts;
    parts.push_back(std::make_unique<open_file>(path));
    const auto& first = parts[0]->header;
    const auto n_parts = u16_of(first, "split.count", 0);
    if (n_parts <= 1) return parts;
    if (const auto i = u16_of(first, "split.no", -1); i != 0) {
        first.fail("is part ", i + 1, " of ", n_parts, "; give the path of the first part");
    }
    const auto ending = part_ending(0, n_parts);
    if (!path.ends_with(ending)) {
        first.fail("is the first of ", n_parts, " parts, but its name does not end with \"", ending,
                   "\"; restore the original names of all parts");
    }
    const auto stem = path.substr(0, path.size() - ending.size());
    for (std::int64_t i = 1; i < n_parts; ++i) {
        parts.push_back(std::make_unique<open_file>(stem + part_ending(i, n_parts)));
        const auto& part = parts.back()->header;
        if (const auto said = u16_of(part, "split.no", -1); said != i) {
            part.fail("split.no is ", said, ", ", i, " is needed", again);
        }
    }
    return parts;
}

}  // namespace

void check_model_file(const std::string& path) {
    const auto parts = open_parts(path);
    std::vector<gguf_tensor> tensors;
    std::unordered_set<std::string_view> names;
    for (const auto& part : parts) {
        for (const auto& tensor : part->header.tensors) {
            if (!names.insert(tensor.name).second) {
                part->header.fail("tensor ", quoted(tensor.name), " is also in another part",
                                  again);
            }
            tensors.push_back(tensor);
        }
        check_tensor_types(parts[0]->header, part->header);
    }
    check_hyperparameters(parts[0]->header, tensors);
    check_vocabulary(parts[0]->header, tensors);
}

std::map<int, std::vector<float>> read_control_vector(const std::string& path) {
    const open_file source(path);
    constexpr std::string_view stem = "direction.";
    std::map<int, std::vector<float>> directions;
    for (const auto& tensor : source.header.tensors) {
        if (!tensor.name.starts_with(stem)) continue;
        const auto number = tensor.name.substr(stem.size());
        const auto* const end = number.data() + number.size();
        int layer = 0;
        const auto read = std::from_chars(number.data(), end, layer);
        // llama.cpp adds nothing behind the first layer.
        if (read.ec != std::errc{} || read.ptr != end || layer < 1) {
            source.header.fail("tensor ", quoted(tensor.name),
                               " names no layer, which are counted from 1 here");
        }
        if (tensor.type != type_f32 || tensor.n_bytes != tensor.shape[0] * sizeof(float)) {
            source.header.fail("tensor ", quoted(tensor.name), " has type ",
                               tensor_types[tensor.type].name, " and shape ", tensor.shape_text(),
                               ", a direction is one row of F32");
        }
        auto& values = directions[layer];
        values.resize(tensor.shape[0]);
        std::memcpy(values.data(), tensor.data.data(), tensor.n_bytes);
    }
    if (directions.empty()) {
        source.header.fail(
            "has no tensor direction.1 and so on; give a control vector, as repeng "
            "writes it");
    }
    return directions;
}

void check_adapter_file(const std::string& path) { check_adapter(open_file(path).header); }

}  // namespace kqview
