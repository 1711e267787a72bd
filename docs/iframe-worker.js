// A browser starts no Worker for a page that was opened from a folder, and Material's search is one.
// There it runs in a hidden frame of the page. (The plugin "offline" would fetch a script for that.)
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = inside.document.createElement("script")
      this.ready = new Promise(loaded => script.addEventListener("load", loaded)).then(() => inside)
      script.src = url
      inside.document.body.append(script)
    }

    postMessage(data) {
      this.ready.then(inside => inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
