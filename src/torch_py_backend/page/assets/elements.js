// Return an element. Text is set as text: what comes from models is never parsed as HTML.
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  const { dataset, ...others } = properties;
  Object.assign(made, others);
  Object.assign(made.dataset, dataset);
  made.append(...children);
  return made;
}

// Replace the children of an element if their text differs.
export function replace(parent, children) {
  const before = [...parent.children].map((child) => child.textContent).join("\n");
  const after = children.map((child) => child.textContent).join("\n");
  if (before !== after) parent.replaceChildren(...children);
}
