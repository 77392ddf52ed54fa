// A backend for PrivateUse1 without device memory: what torch needs to find an accelerator with two devices, and a host
// allocator that counts. A freed block is reused for an allocation of the same size; each block is filled with 0xEE.
//
// Many functions have no `override`, because older versions of torch do not declare all of them.

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <pthread.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>

namespace {

constexpr c10::DeviceIndex DEVICES = 2;
constexpr auto TYPE = c10::DeviceType::PrivateUse1;

thread_local c10::DeviceIndex current_device = 0;

struct Host {
  std::mutex lock;
  std::map<uintptr_t, size_t> live;
  std::multimap<size_t, void*> idle;
  int64_t allocations = 0;
  int64_t reused = 0;
  // Countdown to the allocation that is refused; 0 for none.
  int64_t refuse = 0;
  // The thread and the device of the last allocation.
  char thread[16] = "";
  c10::DeviceIndex device = -1;

  void* allocate(size_t size) {
    std::lock_guard<std::mutex> guard(lock);
    TORCH_CHECK(!(refuse > 0 && --refuse == 0), "the host has no pinned memory left");
    ++allocations;
    pthread_getname_np(pthread_self(), thread, sizeof thread);
    device = current_device;
    void* memory = nullptr;
    auto it = idle.find(size);
    if (it != idle.end()) {
      memory = it->second;
      idle.erase(it);
      ++reused;
    } else {
      memory = std::aligned_alloc(64, (size + 63) / 64 * 64);
    }
    std::memset(memory, 0xEE, size);
    live[reinterpret_cast<uintptr_t>(memory)] = size;
    return memory;
  }

  void release(void* memory) {
    std::lock_guard<std::mutex> guard(lock);
    auto it = live.find(reinterpret_cast<uintptr_t>(memory));
    idle.emplace(it->second, memory);
    live.erase(it);
  }

  bool owns(const void* memory) {
    std::lock_guard<std::mutex> guard(lock);
    auto address = reinterpret_cast<uintptr_t>(memory);
    auto after = live.upper_bound(address);
    if (after == live.begin()) return false;
    auto it = std::prev(after);
    return address < it->first + it->second;
  }
};

// Never destroyed: tensors may outlive main().
Host& host() {
  static Host* host = new Host;
  return *host;
}

struct HostAllocator final : c10::Allocator {
  static void free(void* memory) { host().release(memory); }

  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &free, c10::Device(c10::DeviceType::CPU)};
    void* memory = host().allocate(size);
    return {memory, memory, &free, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free; }

  void copy_data(void* to, const void* from, std::size_t count) const override {
    default_copy_data(to, from, count);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const { return true; }
  bool isAvailable() const { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const { return true; }
  c10::DeviceIndex deviceCount() const { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const { current_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const { return std::exchange(current_device, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const { return exchangeDevice(device); }
  bool isPinnedPtr(const void* memory) const { return host().owns(memory); }
  at::Allocator* getPinnedMemoryAllocator() const {
    static HostAllocator allocator;
    return &allocator;
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {TYPE, std::exchange(current_device, device.index())};
  }
  c10::Device getDevice() const override { return {TYPE, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < DEVICES, "there is no device ", static_cast<int>(device.index()));
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::Stream getStream(c10::Device device) const noexcept {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getDefaultStream(c10::Device device) const {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept {
    return c10::Stream(c10::Stream::DEFAULT, stream.device());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

extern "C" {

int64_t host_live() {
  std::lock_guard<std::mutex> guard(host().lock);
  return static_cast<int64_t>(host().live.size());
}

int64_t host_allocations() { return host().allocations; }

int64_t host_reused() { return host().reused; }

void host_refuse(int64_t nth) { host().refuse = nth; }

const char* host_thread() { return host().thread; }

int64_t host_device() { return host().device; }

}  // extern "C"
