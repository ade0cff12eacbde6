#include "gguf/header.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <unordered_set>
#include <utility>

#include "base/error.h"

namespace kqview {

namespace {

static_assert(std::endian::native == std::endian::little, "GGUF is little endian");

constexpr std::uint32_t n_version_min = 2;
constexpr std::uint32_t n_version_max = 3;
constexpr std::uint64_t n_key_max = 65535;
constexpr std::uint64_t n_name_max = 63;      // ggml stores 64 bytes including a terminating zero
constexpr std::uint64_t n_value_bytes = 14;   // the shortest value: one-letter key, type, one byte
constexpr std::uint64_t n_tensor_bytes = 25;  // the shortest tensor: one-letter name, no dimensions
constexpr std::uint32_t alignment_default = 32;
constexpr const char* cut_short =
    "; it was cut short or damaged; download or convert the file again";

// By number of gguf_type.
struct type_facts {
    const char* name;
    std::size_t n_bytes;  // of an element; 0: it varies
};
constexpr std::array<type_facts, 13> types{{
    {"u8", 1},
    {"i8", 1},
    {"u16", 2},
    {"i16", 2},
    {"u32", 4},
    {"i32", 4},
    {"f32", 4},
    {"bool", 1},
    {"string", 0},
    {"array", 0},
    {"u64", 8},
    {"i64", 8},
    {"f64", 8},
}};

constexpr std::size_t size_of(gguf_type type) {
    return types[static_cast<std::size_t>(type)].n_bytes;
}

class header_reader {
public:
    header_reader(std::span<const std::byte> bytes, gguf_header& header)
        : bytes_(bytes), header_(header) {}

    void read() {
        if (bytes_.size() < 4 || std::memcmp(bytes_.data(), "GGUF", 4) != 0) {
            header_.fail(
                "not a GGUF file (it does not begin with \"GGUF\"); convert the model to GGUF");
        }
        at_ = 4;
        const auto version = take<std::uint32_t>("version");
        if (version < n_version_min || version > n_version_max) {
            fail("version ", version, ", 2 and 3 are known; convert the model again");
        }
        const auto n_tensors = take_count("number of tensors", n_tensor_bytes);
        const auto n_values = take_count("number of values", n_value_bytes);
        for (std::uint64_t i = 0; i < n_values; ++i) read_value();
        const auto alignment = read_alignment();
        std::uint64_t expected = 0;
        std::vector<std::uint64_t> starts;
        for (std::uint64_t i = 0; i < n_tensors; ++i) {
            starts.push_back(expected);
            read_tensor(expected, alignment);
        }
        if (n_tensors > 0) check_data(starts, alignment);
    }

private:
    template <typename... Parts>
    [[noreturn]] void fail(const Parts&... what) const {
        header_.fail(what...);
    }

    std::uint64_t n_left() const { return bytes_.size() - at_; }

    std::span<const std::byte> skip(std::uint64_t n, const std::string& what) {
        if (n > n_left()) {
            fail(what, " at byte ", at_, " needs ", n, " bytes, ", n_left(),
                 " are left of the file", cut_short);
        }
        const auto taken = bytes_.subspan(at_, static_cast<std::size_t>(n));
        at_ += static_cast<std::size_t>(n);
        return taken;
    }

    template <class number>
    number take(const std::string& what) {
        number value;
        std::memcpy(&value, skip(sizeof(value), what).data(), sizeof(value));
        return value;
    }

    // A count of items that need at least `each_bytes` each of the remaining bytes.
    std::uint64_t take_count(const std::string& what, std::uint64_t each_bytes) {
        const auto n_at = at_;
        const auto n = take<std::uint64_t>(what);
        if (n > n_left() / each_bytes) {
            fail(what, " at byte ", n_at, " is ", n, ", ", n_left(), " bytes are left of the file",
                 cut_short);
        }
        return n;
    }

    std::string_view take_string(const std::string& what) {
        const auto n = take<std::uint64_t>(what);
        const auto text = skip(n, what);
        return {reinterpret_cast<const char*>(text.data()), text.size()};
    }

    // A key or a tensor's name: printable ASCII, which the format requires of keys and all
    // converters use for names too.
    std::string_view take_name(const char* what, std::uint64_t n_max) {
        const auto name_at = at_;
        const auto name = take_string(what);
        const auto is_strange = [](char letter) { return letter < 0x20 || letter > 0x7e; };
        if (name.empty() || name.size() > n_max || std::ranges::any_of(name, is_strange)) {
            fail(what, " ", quoted(name), " at byte ", name_at, " has ", name.size(), " bytes, 1..",
                 n_max, " of printable ASCII are allowed", convert_again);
        }
        return name;
    }

    gguf_type take_type(std::string_view key) {
        const auto number = take<std::uint32_t>("type of " + quoted(key));
        if (number > static_cast<std::uint32_t>(gguf_type::f64)) {
            fail("key ", quoted(key), " has type ", number, ", 0..12 are known", convert_again);
        }
        return static_cast<gguf_type>(number);
    }

    void read_value() {
        gguf_value value;
        value.key = take_name("key", n_key_max);
        const auto of = "value of " + quoted(value.key);
        value.type = take_type(value.key);
        std::uint64_t n = 1;
        if (value.type == gguf_type::array) {
            value.is_array = true;
            value.type = take_type(value.key);
            if (value.type == gguf_type::array) {
                fail("key ", quoted(value.key), " is an array of arrays, which GGUF does not have",
                     convert_again);
            }
            n = take_count("length of the array " + quoted(value.key),
                           value.type == gguf_type::string ? 8 : size_of(value.type));
        }
        if (value.type == gguf_type::string) {
            value.strings.reserve(static_cast<std::size_t>(n));
            for (std::uint64_t i = 0; i < n; ++i) value.strings.push_back(take_string(of));
        } else {
            value.numbers = skip(n * size_of(value.type), of);
        }
        if (!header_.value_by_key.emplace(value.key, header_.values.size()).second) {
            fail("key ", quoted(value.key), " is there twice", convert_again);
        }
        header_.values.push_back(std::move(value));
    }

    std::uint64_t read_alignment() const {
        const auto* const value = header_.find("general.alignment", gguf_type::u32);
        if (!value) return alignment_default;
        const auto alignment = static_cast<std::uint64_t>(value->integer());
        if (!std::has_single_bit(alignment)) {
            fail("general.alignment is ", alignment, ", a power of 2 is needed", convert_again);
        }
        return alignment;
    }

    // `expected`: where its data must begin; advanced to where the next tensor's must begin.
    void read_tensor(std::uint64_t& expected, std::uint64_t alignment) {
        gguf_tensor tensor;
        tensor.name = take_name("name of a tensor", n_name_max);
        const auto of = "tensor " + quoted(tensor.name);
        if (!names_.insert(tensor.name).second) fail(of, " is there twice", convert_again);
        tensor.n_dims = take<std::uint32_t>("number of dimensions of " + of);
        if (tensor.n_dims > tensor.shape.size()) {
            fail(of, " has ", tensor.n_dims, " dimensions, the limit is 4", convert_again);
        }
        for (std::uint32_t i = 0; i < tensor.n_dims; ++i) {
            tensor.shape[i] = take<std::uint64_t>("shape of " + of);
        }
        tensor.type = take<std::uint32_t>("type of " + of);
        set_n_bytes(tensor, of);
        const auto offset = take<std::uint64_t>("offset of " + of);
        if (offset != expected) {
            fail(of, " begins at byte ", offset, " of the data, ", expected,
                 " is where the one before it ends; they overlap or leave a gap", convert_again);
        }
        if (expected > bytes_.size()) {
            fail(of, " begins beyond the end of the file, which has ", bytes_.size(), " bytes",
                 cut_short);
        }
        expected += (tensor.n_bytes + alignment - 1) & ~(alignment - 1);
        header_.tensors.push_back(tensor);
    }

    void set_n_bytes(gguf_tensor& tensor, const std::string& of) const {
        if (tensor.type >= tensor_types.size() || !tensor_types[tensor.type].name) {
            fail(of, " has type ", tensor.type,
                 ", which ggml does not know; update kqview or convert the model again");
        }
        const auto& type = tensor_types[tensor.type];
        std::uint64_t n = 1;
        for (const auto size : tensor.shape) {
            // A tensor without values is useless, and ggml divides by sizes.
            if (size == 0 || size > bytes_.size() * 8 || n > bytes_.size() * 8 / size) {
                fail(of, " has shape ", tensor.shape_text(), ", the file has ", bytes_.size(),
                     " bytes", cut_short);
            }
            n *= size;
        }
        if (tensor.shape[0] % type.n_block != 0) {
            fail(of, " has rows of ", tensor.shape[0], " values, ", type.name,
                 " needs a multiple of ", type.n_block, convert_again);
        }
        tensor.n_bytes = n / type.n_block * type.block_bytes;
        if (tensor.n_bytes > bytes_.size()) {
            fail(of, " needs ", tensor.n_bytes, " bytes, the file has ", bytes_.size(), cut_short);
        }
    }

    void check_data(const std::vector<std::uint64_t>& starts, std::uint64_t alignment) {
        const auto data_at = (at_ + alignment - 1) & ~(alignment - 1);
        for (std::size_t i = 0; i < starts.size(); ++i) {
            auto& tensor = header_.tensors[i];
            const auto end = data_at + starts[i] + tensor.n_bytes;
            if (end > bytes_.size()) {
                fail("tensor ", quoted(tensor.name), " ends at byte ", end, ", the file has ",
                     bytes_.size(), cut_short);
            }
            tensor.data = bytes_.subspan(data_at + starts[i], tensor.n_bytes);
        }
    }

    std::span<const std::byte> bytes_;
    gguf_header& header_;
    std::size_t at_ = 0;
    std::unordered_set<std::string_view> names_;
};

template <class number>
number load(std::span<const std::byte> bytes, std::size_t i) {
    number value;
    std::memcpy(&value, bytes.data() + i * sizeof(value), sizeof(value));
    return value;
}

}  // namespace

const char* name_of(gguf_type type) { return types[static_cast<std::size_t>(type)].name; }

std::size_t gguf_value::size() const {
    return type == gguf_type::string ? strings.size() : numbers.size() / size_of(type);
}

bool gguf_value::is_integer() const { return type != gguf_type::string && !is_real(); }

std::int64_t gguf_value::integer(std::size_t i) const {
    switch (type) {
        case gguf_type::u8:
        case gguf_type::boolean: return load<std::uint8_t>(numbers, i);
        case gguf_type::i8: return load<std::int8_t>(numbers, i);
        case gguf_type::u16: return load<std::uint16_t>(numbers, i);
        case gguf_type::i16: return load<std::int16_t>(numbers, i);
        case gguf_type::u32: return load<std::uint32_t>(numbers, i);
        case gguf_type::i32: return load<std::int32_t>(numbers, i);
        case gguf_type::i64: return load<std::int64_t>(numbers, i);
        case gguf_type::u64: {
            constexpr auto most = std::numeric_limits<std::int64_t>::max();
            const auto value = load<std::uint64_t>(numbers, i);
            return std::in_range<std::int64_t>(value) ? static_cast<std::int64_t>(value) : most;
        }
        default: return 0;
    }
}

double gguf_value::real(std::size_t i) const {
    return type == gguf_type::f32 ? static_cast<double>(load<float>(numbers, i))
                                  : load<double>(numbers, i);
}

std::string gguf_value::type_text() const {
    return text_of(is_array ? "array of " : "", name_of(type));
}

std::string gguf_tensor::shape_text() const {
    std::string text = "[";
    for (std::uint32_t i = 0; i < n_dims; ++i) {
        text += text_of(i > 0 ? ", " : "", shape[i]);
    }
    return text + "]";
}

const gguf_value* gguf_header::find(std::string_view key) const {
    const auto found = value_by_key.find(key);
    return found == value_by_key.end() ? nullptr : &values[found->second];
}

const gguf_value* gguf_header::find(std::string_view key, gguf_type type, bool is_array) const {
    const auto* const value = find(key);
    if (value && (value->is_array != is_array || value->type != type)) {
        fail(key, " is of type ", value->type_text(), ", ", is_array ? "array of " : "",
             name_of(type), " is needed", convert_again);
    }
    return value;
}

const gguf_value& gguf_header::at(std::string_view key, gguf_type type, bool is_array) const {
    if (const auto* const value = find(key, type, is_array)) return *value;
    fail(key, " is missing", convert_again);
}

std::string quoted(std::string_view text) {
    constexpr std::size_t n_most = 80;
    std::string shown = "'";
    for (const char letter : text.substr(0, n_most)) {
        const auto code = static_cast<unsigned char>(letter);
        shown += code < 0x20 || code >= 0x7f ? '?' : letter;
    }
    return shown + (text.size() > n_most ? "...'" : "'");
}

gguf_header read_gguf(std::span<const std::byte> bytes, std::string file) {
    gguf_header header;
    header.file = std::move(file);
    header_reader(bytes, header).read();
    return header;
}

}  // namespace kqview
