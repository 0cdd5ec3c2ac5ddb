// Calls of CUDA that fail because a test asks for it.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

// What can fail, and the error: that which CUDA's documentation has for it, or, where any is
// allowed, one that is not sticky: the device goes on.
#define STANDIN_FAILING(X)       \
  X(cudaMalloc, 2)               \
  X(cuMemCreate, 2)              \
  X(cudaHostAlloc, 2)            \
  X(cudaHostRegister, 2)         \
  X(cudaEventCreate, 2)          \
  X(cudaStreamCreate, 2)         \
  X(cudaEventRecord, 999)        \
  X(cudaStreamWaitEvent, 999)    \
  X(cudaMemcpyAsync, 999)

enum class Fails {
#define X(name, error) name,
  STANDIN_FAILING(X)
#undef X
  count
};

class Failing {
 public:
  Failing() {
    // CALL:N is the n-th call alone, CALL:N+ all from there on, CALL:N+K so many.
    const char* asked = getenv("STAND_IN_FAIL");
    if (!asked || !*asked) return;
    const char* colon = strchr(asked, ':');
    std::string name(asked, colon ? colon - asked : strlen(asked));
    char* end = nullptr;
    uint64_t nth = colon ? strtoull(colon + 1, &end, 10) : 1, times = 1;
    if (end && *end == '+') times = end[1] ? strtoull(end + 1, nullptr, 10) : UINT64_MAX;
    if (!from_now_on(name.c_str(), nth, times))
      fprintf(stderr, "stand-in: STAND_IN_FAIL=%s names nothing that can fail\n", asked);
  }

  // The nth call of `name` from now on fails, and those after it until `times` have; nothing else
  // does any more. An empty name: nothing does. Returns whether there is such a call.
  bool from_now_on(const char* name, uint64_t nth, uint64_t times) {
    std::lock_guard<std::mutex> lock(mutex_);
    which_ = Fails::count;
    if (!*name) return true;
    for (int i = 0; i < int(Fails::count); ++i) {
      if (strcmp(names[i], name)) continue;
      which_ = Fails(i);
      first_ = calls_[i] + nth;
      last_ = times > UINT64_MAX - first_ ? UINT64_MAX : first_ + times - 1;
      return true;
    }
    return false;
  }

  // Counts a call; the error that it returns, 0 for none.
  int called(Fails call) {
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t now = ++calls_[int(call)];
    if (call != which_ || now < first_ || now > last_) return 0;
    failed_++;
    return errors[int(call)];
  }

  uint64_t calls(int call) {
    std::lock_guard<std::mutex> lock(mutex_);
    return call >= 0 && call < int(Fails::count) ? calls_[call] : 0;
  }
  uint64_t failed() {
    std::lock_guard<std::mutex> lock(mutex_);
    return failed_;
  }
  static const char* name(int call) {
    return call >= 0 && call < int(Fails::count) ? names[call] : nullptr;
  }

 private:
#define X(name, error) #name,
  static constexpr const char* names[] = {STANDIN_FAILING(X)};
#undef X
#define X(name, error) error,
  static constexpr int errors[] = {STANDIN_FAILING(X)};
#undef X
  std::mutex mutex_;
  Fails which_ = Fails::count;
  uint64_t first_ = 0, last_ = 0, failed_ = 0;
  uint64_t calls_[int(Fails::count)] = {};
};
