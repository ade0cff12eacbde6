#include "sample/constraint_host.h"

#include <fcntl.h>
#include <llama.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace kqview {
namespace {

using clock = std::chrono::steady_clock;

constexpr std::chrono::seconds start_limit{60};
// How soon a wait sees that nobody wants its result.
constexpr std::chrono::milliseconds between_checks{20};
// llguidance's prefix of a special token: no text matches it.
constexpr char special_mark = '\xff';

#ifdef MSG_NOSIGNAL
constexpr int send_flags = MSG_NOSIGNAL | MSG_DONTWAIT;
#else
constexpr int send_flags = MSG_DONTWAIT;
#endif

bool never() { return false; }

[[noreturn]] void throw_not_started(int code) {
    throw error(errc::busy,
                "the helper process of constraints does not start: ", std::strerror(code),
                "; retry later");
}

std::pair<process_socket, process_socket> make_pair() {
    std::array<int, 2> fds{};
    // A process that another thread starts between these calls gets copies that it never uses;
    // macOS knows no SOCK_CLOEXEC.
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, fds.data()) != 0) throw_not_started(errno);
    for (const int fd : fds) {
        fcntl(fd, F_SETFD, FD_CLOEXEC);
#ifdef SO_NOSIGPIPE
        const int on = 1;
        setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof on);
#endif
    }
    return {process_socket(fds[0]), process_socket(fds[1])};
}

// Waits until `fd` is ready for `events`.
bool await(int fd, short events, clock::time_point until, const std::function<bool()>& is_stopped) {
    while (!is_stopped() && clock::now() < until) {
        pollfd one{fd, events, 0};
        const int n = poll(&one, 1, static_cast<int>(between_checks.count()));
        if (n > 0) return true;
        if (n < 0 && errno != EINTR) return false;
    }
    return false;
}

bool is_retried(int code) { return code == EAGAIN || code == EWOULDBLOCK || code == EINTR; }

template <typename T>
void append(std::string& bytes, const T* values, std::size_t n) {
    bytes.append(reinterpret_cast<const char*>(values), n * sizeof(T));
}

// An operation on a child, on the control socket: 'f' forks it, 'k' kills it and answers with the
// signal that had ended it, 'd' kills it.
struct operation {
    std::array<char, 8> bytes;
    operation(char kind, std::uint32_t number) : bytes{kind} {
        std::memcpy(bytes.data() + 4, &number, sizeof number);
    }
};

}  // namespace

process_socket::~process_socket() {
    if (fd_ >= 0) ::close(fd_);
}

process_socket& process_socket::operator=(process_socket&& from) noexcept {
    std::swap(fd_, from.fd_);
    return *this;
}

bool process_socket::send(const void* data, std::size_t n, clock::time_point until,
                          const std::function<bool()>& is_stopped) const {
    const auto* bytes = static_cast<const char*>(data);
    while (n > 0) {
        const auto n_sent = ::send(fd_, bytes, n, send_flags);
        if (n_sent > 0) {
            bytes += n_sent;
            n -= static_cast<std::size_t>(n_sent);
        } else if (!is_retried(errno) || !await(fd_, POLLOUT, until, is_stopped)) {
            return false;
        }
    }
    return true;
}

bool process_socket::receive(void* data, std::size_t n, clock::time_point until,
                             const std::function<bool()>& is_stopped) const {
    auto* bytes = static_cast<char*>(data);
    while (n > 0) {
        const auto n_read = ::recv(fd_, bytes, n, MSG_DONTWAIT);
        if (n_read == 0) return false;
        if (n_read > 0) {
            bytes += n_read;
            n -= static_cast<std::size_t>(n_read);
        } else if (!is_retried(errno) || !await(fd_, POLLIN, until, is_stopped)) {
            return false;
        }
    }
    return true;
}

constraint_host::constraint_host(std::vector<std::string> command,
                                 std::shared_ptr<const model> source)
    : command_(std::move(command)),
      source_(std::move(source)),
      n_vocab_(static_cast<std::uint32_t>(source_->n_vocab())) {
    start();
}

constraint_host::~constraint_host() { stop(); }

// As constraint_child.py reads it: a head, the tokens that end the text, the lengths of all tokens,
// and their bytes.
std::string constraint_host::vocabulary() {
    const llama_vocab* const vocab = source_->vocab();
    std::vector<std::uint32_t> lengths;
    std::vector<std::uint32_t> ends;
    std::string bytes;
    lengths.reserve(n_vocab_);
    std::vector<bool> is_end_of(n_vocab_);
    for (token_id id = 0; source_->has_vocab() && id < source_->n_vocab(); ++id) {
        const std::size_t start = bytes.size();
        const int special = LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_UNKNOWN;
        const bool is_end = llama_vocab_is_eog(vocab, id);
        if (is_end || (llama_vocab_get_attr(vocab, id) & special) != 0) bytes += special_mark;
        bytes += source_->token_bytes(id);
        lengths.push_back(static_cast<std::uint32_t>(bytes.size() - start));
        is_end_of[static_cast<std::size_t>(id)] = is_end;
        if (is_end) ends.push_back(static_cast<std::uint32_t>(id));
    }
    if (ends.empty()) {
        throw error(errc::invalid_sampling,
                    "json_schema, regex and %llguidance need a token that ends the text, and this "
                    "model has none; use a grammar in GBNF");
    }
    // Once: other threads read it while a helper is replaced.
    if (is_end_.empty()) is_end_ = std::move(is_end_of);
    const std::array<std::uint64_t, 4> head{n_vocab_, ends.size(), bytes.size(), memory_bytes};
    const std::array<double, 2> limits{compile_cpu_s, step_cpu_s};
    std::string all;
    append(all, head.data(), head.size());
    append(all, limits.data(), limits.size());
    append(all, ends.data(), ends.size());
    append(all, lengths.data(), lengths.size());
    return all + bytes;
}

// With mutex_, or in the constructor.
void constraint_host::start() {
    const std::string words = vocabulary();
    auto [ours, theirs] = make_pair();
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_adddup2(&files, theirs.fd(), 0);
    for (const int fd : {1, 2}) {
        posix_spawn_file_actions_addopen(&files, fd, "/dev/null", O_WRONLY, 0);
    }
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    sigset_t none;
    sigemptyset(&none);
    posix_spawnattr_setsigmask(&attributes, &none);
    // Its limit on CPU time and its wait for children need signals that the owner may ignore.
    sigset_t all;
    sigfillset(&all);
    posix_spawnattr_setsigdefault(&attributes, &all);
    posix_spawnattr_setflags(&attributes,
                             POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSID);
    std::vector<char*> arguments;
    for (const auto& one : command_) arguments.push_back(const_cast<char*>(one.c_str()));
    arguments.push_back(nullptr);
    // Nothing of the environment but what the loader may need.
    std::vector<std::string> kept;
    for (const char* const name : {"LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"}) {
        if (const char* const value = std::getenv(name))
            kept.push_back(std::string(name) + "=" + value);
    }
    std::vector<char*> environment;
    for (auto& one : kept) environment.push_back(one.data());
    environment.push_back(nullptr);
    const int code =
        posix_spawn(&pid_, arguments[0], &files, &attributes, arguments.data(), environment.data());
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&files);
    if (code != 0) {
        pid_ = -1;
        throw_not_started(code);
    }
    control_ = std::move(ours);
    theirs = process_socket();
    const auto until = clock::now() + start_limit;
    char status = 0;
    std::array<char, 300> reason{};
    // It may end before it has read all of this, and has said why.
    (void)control_.send(words.data(), words.size(), until, never);
    if (control_.receive(&status, 1, until, never)) {
        if (status == 'r') return;
        (void)control_.receive(reason.data(), reason.size() - 1, until, never);  // up to the end
    }
    stop();
    if (status == 0) throw_not_started(ETIMEDOUT);
    throw error(errc::request, "llguidance cannot be used: ", reason.data(),
                "; json_schema, regex and %llguidance need version 1.9 or newer, pip install -U "
                "llguidance");
}

// With mutex_, or in the destructor. The helper kills its children when it reads the end.
void constraint_host::stop() noexcept {
    control_ = process_socket();
    if (pid_ < 0 || guard_.is_forked()) return;  // the parent's
    const auto until = clock::now() + std::chrono::seconds{2};
    pid_t ended = 0;
    while ((ended = waitpid(pid_, nullptr, WNOHANG)) == 0 && clock::now() < until) {
        poll(nullptr, 0, 1);
    }
    if (ended == 0) {
        kill(pid_, SIGKILL);
        waitpid(pid_, nullptr, 0);
    }
    pid_ = -1;
}

constraint_host::child constraint_host::open() {
    const std::lock_guard lock(mutex_);
    if (guard_.is_forked()) {
        throw error(errc::closed, "the helper process of constraints belongs to the parent");
    }
    send_dropped();
    child wanted{++n_children_, process_socket()};
    if (try_fork(wanted)) return wanted;
    stop();  // somebody has killed it
    start();
    if (!try_fork(wanted)) throw_not_started(EAGAIN);
    return wanted;
}

bool constraint_host::try_fork(child& wanted) {
    auto [ours, theirs] = make_pair();
    operation wish('f', wanted.number);
    iovec part{wish.bytes.data(), wish.bytes.size()};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> room{};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = room.data();
    message.msg_controllen = room.size();
    cmsghdr* const passed = CMSG_FIRSTHDR(&message);
    passed->cmsg_level = SOL_SOCKET;
    passed->cmsg_type = SCM_RIGHTS;
    passed->cmsg_len = CMSG_LEN(sizeof(int));
    const int fd = theirs.fd();
    std::memcpy(CMSG_DATA(passed), &fd, sizeof fd);
    char is_done = 0;
    if (sendmsg(control_.fd(), &message, send_flags) != static_cast<ssize_t>(wish.bytes.size()) ||
        !control_.receive(&is_done, 1, clock::now() + start_limit, never)) {
        return false;
    }
    if (is_done == 0) throw_not_started(EAGAIN);
    wanted.socket = std::move(ours);
    return true;
}

constraint_host::cause constraint_host::end(std::uint32_t number) {
    const std::lock_guard lock(mutex_);
    send_dropped();
    const operation wish('k', number);
    const auto until = clock::now() + start_limit;
    char code = 0;
    const bool is_told = control_.send(wish.bytes.data(), wish.bytes.size(), until, never) &&
                         control_.receive(&code, 1, until, never);
    if (!is_told) control_ = process_socket();  // a late answer would be taken for the next one's
    switch (is_told ? code : 0) {
        case SIGPROF: return cause::cpu_time;
        case SIGABRT:
        case SIGKILL: return cause::memory;
        case SIGSEGV:
        case SIGBUS: return cause::depth;
        default: return cause::other;
    }
}

void constraint_host::drop(std::uint32_t number) noexcept {
    if (guard_.is_forked()) return;  // the parent's
    try {
        const std::lock_guard lock(dropped_mutex_);
        dropped_.push_back(number);
    } catch (...) {
        // Its child ends with its own socket, and is waited for at the end of the helper.
    }
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (lock) send_dropped();
}

// With mutex_.
void constraint_host::send_dropped() noexcept {
    const std::lock_guard lock(dropped_mutex_);
    for (const auto number : dropped_) {
        const operation wish('d', number);
        (void)::send(control_.fd(), wish.bytes.data(), wish.bytes.size(), send_flags);
    }
    dropped_.clear();
}

}  // namespace kqview
